"""The command ``whereformer demo``: one attention head learns to look at the token before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console

from ..errors import InputError
from ..lab.recipe import WithPlugin

STEPS, BATCH, LENGTH, WORDS, WIDTH = 100, 16, 32, 16, 32
REACH = 5
"""The largest offset that is shown."""
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class Demo(WithPlugin):
    """Watch one attention head learn to look at the token before: a few seconds, without data or a download.

    The head reads random words and must say, at each of them, the word before. Only positions show which word that is.
    """

    EXAMPLE: ClassVar = "whereformer demo --position t5"

    position: str = "tisa"
    """The position method of the head, one that adds a number per offset: tisa, t5, kerple, or your own."""

    def run(self, console: Console) -> None:
        """Train the head, and show where it looks in the meantime."""
        import torch
        from torch import nn
        from torch.nn import functional

        from ..kernels import Positions, attention
        from ..positions import build_position
        from ..positions.base import OffsetFunction
        from ..positions.site import Site

        torch.manual_seed(0)
        position = build_position(self.position, hidden_size=WIDTH, num_heads=1)
        if not isinstance(position, OffsetFunction):
            raise InputError("position", f"expected a method that adds a number per offset, got {self.position!r}")
        model = nn.ModuleDict(
            {"position": position, "input": nn.Embedding(WORDS, WIDTH), "output": nn.Linear(WIDTH, WORDS)}
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        site = Site.self_attention(Positions(0, 1, LENGTH))
        console.print(f"Guessing: loss {math.log(WORDS):.2f}. The bars: attention to offsets -{REACH} to {REACH}.")
        for step in range(STEPS + 1):
            words = torch.randint(WORDS, (BATCH, LENGTH))
            hidden = model["input"](words)  # (batch, n, hidden_size)
            # Without a query and a key, the weights depend on position only; (batch, 1, n, hidden_size).
            heads = attention(None, None, hidden.unsqueeze(1), position.terms(hidden, site))
            logits = model["output"](heads.squeeze(1))
            loss = functional.cross_entropy(logits[:, 1:].flatten(0, 1), words[:, :-1].flatten())
            if step % 10 == 0:
                weights = position.curve(range(-REACH, REACH + 1))[0].softmax(0).tolist()
                bars = " ".join(BARS[round(weight * (len(BARS) - 1))] for weight in weights)
                console.print(f"step {step:3}  loss {loss.item():.2f}  {bars}", highlight=False)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        offset = max(range(-REACH, REACH + 1), key=lambda offset: weights[offset + REACH])
        share = f"The head gives {weights[offset + REACH]:.0%} of its attention to offset {offset:+d}"
        console.print(share + (": the token before." if offset == -1 else "."), highlight=False)
        console.print("Next: whereformer compare --quick ranks eight methods on text.", highlight=False)
