"""A position method of your own in fifteen lines: a bonus for near tokens that fades exponentially.

If the whole effect of a method is one number per head and offset, only `curve` needs to be written. Attention reads the
curve as a table, so memory stays O(n). After registration, encoders and studies know the method by its name. Commands
run this file first: `whereformer compare --positions none,rope,fading --plugin examples/own_method.py`.
"""

import torch
from torch import nn

import whereformer
from whereformer.positions import OffsetFunction, register
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
        return self.strength.view(heads_first) * torch.exp(-distance / self.log_reach.exp().view(heads_first))


register("fading", Fading)

if __name__ == "__main__":
    torch.manual_seed(0)
    check_position(Fading)
    print("keeps the laws of all position methods")

    position = whereformer.build_position("fading", hidden_size=32, num_heads=2)
    print("\nnumbers that each head adds at offsets -4 .. 4:")
    for row in position.curve(range(-4, 5)).tolist():
        print("   ", " ".join(f"{number:.2f}" for number in row))

    config = whereformer.EncoderConfig(
        vocab_size=100, hidden_size=32, num_attention_heads=2, blocks="2", position="learned+fading"
    )
    model = whereformer.EncoderForMaskedLM(config)
    words = torch.randint(100, (2, 20))
    loss = model(words, labels=words).loss
    loss.backward()
    print(f"\nin an encoder, beside learned positions: loss {loss.item():.2f}, and gradients of")
    for name, parameter in model.named_parameters():
        if name.endswith(("strength", "log_reach")):
            print(f"    {name}, {tuple(parameter.shape)}, largest {parameter.grad.abs().max().item():.1e}")
