"""Training on many devices, against numbers computed by hand."""

import pytest

from whereformer.analysis import cost
from whereformer.analysis.costs import Hardware, ways
from whereformer.cli.main import main
from whereformer.models import EncoderConfig

CONFIG = EncoderConfig(vocab_size=100, hidden_size=16, num_attention_heads=2, blocks="2", max_position_embeddings=32)
COST = cost(CONFIG, 32, 4)
SLOW = Hardware(flops=1e9, efficiency=0.5, link=1e6, network=1e5, latency=0.001, per_machine=2, overlap=False)
WEIGHTS = COST.memory.weights


def test_one_device_sends_nothing_and_computes_everything():
    for way in ways(COST, CONFIG, 1, SLOW):
        assert way.seconds == way.compute == COST.flops.training / 0.5e9
        assert (way.traffic, way.share, way.tokens) == (0, 1, 128)
        assert way.memory == 4 * WEIGHTS + COST.memory.training + COST.memory.head


def test_two_devices_by_hand():
    ddp, fsdp, context = ways(COST, CONFIG, 2, SLOW)
    activations = COST.memory.training + COST.memory.head
    # Each of two devices sends half of the gradients to add them up, and half of the sums.
    assert ddp.traffic == WEIGHTS
    assert ddp.seconds == pytest.approx(COST.flops.training / 0.5e9 + WEIGHTS / 1e6 + 2 * 0.001)
    assert ddp.tokens == 256
    assert fsdp.memory == 4 * WEIGHTS / 2 + WEIGHTS / 2 + activations
    assert fsdp.traffic == 1.5 * WEIGHTS
    # Six tensors of keys' size, (4, 32, 16) float32, of which each device sends half, in each of two layers.
    assert context.traffic == WEIGHTS + 6 * 4 * 32 * 16 * 4 / 2 * 2 + 2 * 16
    assert context.memory == 4 * WEIGHTS + activations / 2
    assert context.compute == ddp.compute / 2
    assert context.tokens == 128


def test_more_than_a_machine_is_as_slow_as_the_network_and_overlap_hides_traffic():
    ddp = ways(COST, CONFIG, 4, SLOW)[0]
    assert ddp.communication == pytest.approx(1.5 * WEIGHTS / 1e5 + 4 * 0.001)
    hidden = ways(COST, CONFIG, 2, Hardware(flops=1e3))[0]
    assert hidden.communication > 0
    assert hidden.seconds == hidden.compute


def test_pooled_layers_send_shorter_keys_and_short_sequences_have_no_ring():
    config = EncoderConfig(vocab_size=100, hidden_size=16, num_attention_heads=2, blocks="1-1", decoder_layers="1")
    found = cost(config, 32, 4)
    context = ways(found, config, 2, SLOW)[2]
    keys = (32 + found.lengths[1] + 32) * 4 * 16 * 4
    assert context.traffic == found.memory.weights + 6 * keys / 2 + 3 * 16
    assert [way.name for way in ways(found, config, 64, SLOW)] == ["DDP", "FSDP"]


def test_the_command_names_the_hardware(capsys):
    main(["cost", "--devices", "64", "--link", "9e11"])
    out = capsys.readouterr().out
    assert "64 x H200: 40% of 989 TFLOP/s, 400 GB/s between neighbors" in out
    assert "DDP" in out
    assert "not with a table of offsets, which would be 49 kB" in out  # 12 heads of 1,023 offsets, 4 bytes each
    with pytest.raises(SystemExit):
        main(["cost", "--devices", "0"])
    assert "--devices: expected 1 to 1048576, got 0" in capsys.readouterr().err
