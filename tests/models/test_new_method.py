"""Adding a method is one class and one line: a toy is registered, trained in the encoder and compared."""

import pytest
import torch
from torch import nn

from whereformer import EncoderConfig, EncoderForMaskedLM
from whereformer.positions import METHODS, register
from whereformer.positions.base import OffsetFunction, as_offsets


class PreviousToken(OffsetFunction):
    """One trained number per head, added at offset -1 only."""

    def __init__(self, model):
        super().__init__(model)
        self.strength = nn.Parameter(torch.empty(model.num_heads))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.strength)

    def reach(self, *, layer=0, shared=None):
        return 2

    def curve(self, offsets, *, layer=0):
        return self.strength[:, None] * (as_offsets(offsets, self.strength) == -1)


@pytest.fixture
def toy():
    register("toy", PreviousToken)
    yield
    del METHODS["toy"]


def final_loss(position):
    """Train on predicting at every other place the token before it, which needs to know where tokens are."""
    torch.manual_seed(0)
    model = EncoderForMaskedLM(
        EncoderConfig(
            vocab_size=12,
            hidden_size=32,
            num_attention_heads=2,
            blocks="2",
            position=position,
            norm="pre",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        ids = torch.randint(2, 12, (32, 10))
        labels = torch.full_like(ids, -100)
        labels[:, 1::2] = ids[:, ::2]
        ids[:, 1::2] = 1
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), model


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_a_toy_method_trains_and_beats_no_positions():
    toy_loss, model = final_loss("toy")
    none_loss, _ = final_loss("none")
    assert none_loss > 1.2
    assert toy_loss < 0.5
    assert model.encoder.position.strength.abs().max() > 1


@pytest.mark.usefixtures("toy")
def test_a_toy_method_composes():
    model = EncoderForMaskedLM(
        EncoderConfig(vocab_size=12, hidden_size=32, num_attention_heads=2, blocks="1", position="learned+toy")
    )
    assert {name.split(".")[-1] for name, _ in model.encoder.position.named_parameters()} == {"weight", "strength"}
