"""What is remembered of calls and of tables: the same bits as without memories, and nothing stale."""

from contextlib import contextmanager

import pytest
import torch

import whereformer.kernels
from tests.kernels.cases import need_native
from whereformer import Encoder, EncoderConfig, position_names
from whereformer.kernels import remember

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "blocks": "2"}
SIZES |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(autouse=True)
def _memories():
    need_native()
    remember(True)
    yield
    remember(True)


@contextmanager
def without_memories():
    remember(False)
    yield
    remember(True)


def encoder(name):
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(position=name, **SIZES))
    for parameter in model.position.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def results_of(model, dtype, training):
    """The output for some tokens, and all gradients in training."""
    ids = torch.arange(36).view(2, 18) % 50
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"), torch.set_grad_enabled(training):
        output = model(ids).last_hidden_state
    if not training:
        return [output]
    return [output, *torch.autograd.grad(output.float().square().sum(), list(model.parameters()), allow_unused=True)]


def are_equal(found, wanted):
    return all(each is other is None or torch.equal(each, other) for each, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", position_names())
def test_every_method_is_remembered_and_gives_the_bits_of_a_call_that_is_not(name, dtype, monkeypatch):
    model = encoder(name).to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    for training in (True, False):
        first = results_of(model.train(training), dtype, training)
        with monkeypatch.context() as patch:
            patch.delattr(whereformer.kernels, "make_call")
            later = results_of(model, dtype, training)
        with without_memories():
            wanted = results_of(model, dtype, training)
        assert are_equal(first, wanted)
        assert are_equal(later, wanted)
