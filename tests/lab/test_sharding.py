"""Models whose weights FSDP2 divides among two processes take the steps of whole ones, for every position method."""

import os
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed, multiprocessing
from torch.distributed.fsdp import fully_shard

from tests.every import EVERY
from whereformer import EncoderConfig, EncoderForMaskedLM, position_names, ranks

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 40}
STEPS = 3


def build(position):
    """A funnel with a decoder, which has every kind of layer."""
    torch.manual_seed(0)
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = EncoderConfig(**SIZES, **without_dropout, blocks="1-1-1", decoder_layers="1", position=position)
    return EncoderForMaskedLM(config)


def rows():
    return torch.randint(1, 60, (4, 17), generator=torch.Generator().manual_seed(1))


def train(model, ids):
    """The losses, (steps,)."""
    # Plain descent: Adam would make a large step of a gradient that is zero but for rounding.
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def _sharded(rank, port, folder, positions):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    ranks.join(torch.device("cpu"))
    mesh = distributed.init_device_mesh("cpu", (2,))
    for position in positions:
        model = build(position)
        for layer in model.encoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        losses = train(model, rows()[rank::2])
        distributed.all_reduce(losses)
        weights = {name: weight.full_tensor().detach() for name, weight in model.named_parameters()}
        if ranks.is_main():
            save_file({**weights, "losses": losses / 2}, folder / f"{position}.safetensors")
    ranks.wait()
    ranks.leave()


# Of torch, about its own code.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.slow
def test_every_method_trains_sharded(tmp_path, subtests):
    with socket.socket() as chosen:
        chosen.bind(("localhost", 0))
        port = chosen.getsockname()[1]
    positions = position_names() if EVERY else ("floater", "shaw", "tupe")
    multiprocessing.spawn(_sharded, (port, tmp_path, positions), nprocs=2)
    for position in positions:
        with subtests.test(position):
            sharded, model = load_file(tmp_path / f"{position}.safetensors"), build(position)
            initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
            losses = train(model, rows())
            torch.testing.assert_close(sharded.pop("losses"), losses, rtol=1e-6, atol=1e-6)
            trained = {name: weight.detach() for name, weight in model.named_parameters()}
            torch.testing.assert_close(sharded, trained, rtol=1e-5, atol=1e-6)
            assert any(not torch.equal(weight, initial[name]) for name, weight in trained.items())
