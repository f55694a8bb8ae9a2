"""Sinusoids equal those of tensor2tensor, fairseq and bert4keras."""

import pytest
import torch

from tests.golden import check, groups
from whereformer import Positions, build_position

T2T_ADD, T2T_SIGNAL = groups("positions/sinusoidal_t2t", "add", "n")
[INTERLEAVED] = groups("positions/sinusoidal_interleaved", "n")
[FAIRSEQ] = groups("positions/sinusoidal_fairseq", "n")


def sinusoidal(width, **options):
    return build_position("sinusoidal", hidden_size=width, num_heads=1, **options)


def check_float32_angles(actual, golden, last_position):
    """The originals compute angles in float32, whose error grows with the position."""
    torch.testing.assert_close(actual, golden, rtol=0.0, atol=1e-7 * (1 + last_position))


@pytest.mark.parametrize("case", T2T_SIGNAL)
def test_blocks_equal_the_timing_signal_of_tensor2tensor(case):
    golden, n, width = case.tensors(), case.config["n"], case.config["d"]
    options = {name: case.config[name] for name in ("min_timescale", "max_timescale")}
    start = case.config["start_index"]

    signal = sinusoidal(width, layout="blocks", **options).embed(
        torch.zeros(1, n, width, dtype=torch.float64), Positions(start, 1, n)
    )

    check_float32_angles(signal[0], golden["signal"], start + n - 1)


@pytest.mark.parametrize("case", T2T_ADD)
def test_embed_adds_the_signal(case):
    golden, n = case.tensors(), case.config["n"]
    out = sinusoidal(case.config["d"], layout="blocks").embed(golden["x"], Positions(0, 1, n))
    check_float32_angles(out, golden["out"], n - 1)


@pytest.mark.parametrize("case", INTERLEAVED)
def test_interleaved_equals_the_paper_as_bert4keras_runs_it(case):
    golden, n, width = case.tensors(), case.config["n"], case.config["d"]
    position = sinusoidal(width, layout="interleaved", max_timescale=case.config["base"])

    table = position.embed(torch.zeros(1, n, width, dtype=torch.float64), golden["positions"])

    check(table[0], golden["table"], 1e-12)


@pytest.mark.parametrize("case", FAIRSEQ)
def test_blocks_equal_fairseq_at_its_shifted_positions(case):
    """fairseq counts real tokens only, from padding_idx + 1 on, and zeroes padding; here the caller does both."""
    golden, width, padding = case.tensors(), case.config["d"], case.config["padding_idx"]
    position = sinusoidal(width, layout="blocks")
    real = golden["tokens"] != padding
    positions = real.cumsum(-1) + padding

    vectors = position.embed(torch.zeros(*real.shape, width, dtype=torch.float64), positions)
    check(vectors * real.unsqueeze(-1), golden["out"], 1e-6)

    rows = torch.arange(len(golden["table"]))
    table = position.embed(torch.zeros(1, len(rows), width, dtype=torch.float64), rows)[0]
    check(table * (rows != padding).unsqueeze(-1), golden["table"], 1e-6)
