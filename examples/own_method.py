"""Your own position method in fifteen lines: a bonus for near tokens that fades exponentially, and what it learns.

If the whole effect of a method is one number per head and offset, only `curve` needs to be written. Attention reads the
curve as a table, so memory stays O(n). After registration, encoders and studies know the method by its name. Commands
run this file first: `whereformer compare --positions none,rope,fading --plugin examples/own_method.py`.
"""

import torch
from torch import nn

import whereformer
from whereformer.positions import OffsetFunction, register
from whereformer.positions.base import float_dtype
from whereformer.positions.testing import check_position


class Fading(OffsetFunction):
    """Adds ``strength * exp(-|offset| / reach)`` to the scores, with a trained strength and reach per head."""

    def __init__(self, model):
        super().__init__(model)
        self.strength = nn.Parameter(torch.empty(model.num_heads))
        self.log_reach = nn.Parameter(torch.empty(model.num_heads))
        self.reset_parameters()

    def reset_parameters(self):
        # Only functions of nn.init: loaders switch them off, and anything else would overwrite trained weights.
        nn.init.ones_(self.strength)
        nn.init.normal_(self.log_reach, 1.0, 0.5)

    def curve(self, offsets, *, layer=0):
        distance = torch.as_tensor(offsets, device=self.strength.device).abs()
        heads_first = (-1, *[1] * distance.dim())  # offsets may have any shape
        dtype = float_dtype(self.strength)  # at least float32, even if the parameters have half precision
        strength, reach = self.strength.to(dtype).view(heads_first), self.log_reach.to(dtype).exp().view(heads_first)
        return strength * torch.exp(-distance / reach)


register("fading", Fading)

VOCABULARY, MASK, STEPS = 20, 0, 200


def train(position):
    """Train a small encoder to fill in masked words; return it and its mean loss in the last 20 steps, in nats.

    Each word is repeated eight times, so most words nearby are the answer. A model without positions cannot know which
    words are nearby.
    """
    torch.manual_seed(0)
    config = whereformer.EncoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_attention_heads=2,
        blocks="1",
        position=position,
        initializer_range=0.1,  # a narrow model needs larger weights than BERT
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = whereformer.EncoderForMaskedLM(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        words = torch.randint(1, VOCABULARY, (16, 4)).repeat_interleave(8, dim=1)  # (batch, n)
        is_masked = torch.rand(words.shape) < 0.3
        loss = model(words.masked_fill(is_masked, MASK), labels=words.masked_fill(~is_masked, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, sum(losses[-20:]) / 20


def print_curve(method):
    """Print the numbers that each head adds at offsets -4 .. 4."""
    with torch.no_grad():
        for row in method.curve(range(-4, 5)).tolist():
            print("   ", " ".join(f"{number:.2f}" for number in row))


if __name__ == "__main__":
    torch.manual_seed(0)
    check_position(Fading)
    print("keeps the laws of all position methods")

    print("\nnumbers that each head adds at offsets -4 .. 4, before training:")
    print_curve(whereformer.build_position("fading", hidden_size=32, num_heads=2))
    model, loss = train("fading")
    print("after training:")
    print_curve(next(module for module in model.modules() if isinstance(module, Fading)))
    print(f"\nloss of masked words with fading: {loss:.2f}")
    print(f"loss without positions: {train('none')[1]:.2f}")
