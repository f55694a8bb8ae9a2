"""A model that is trained, with the mean of its weights at some steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Averaged(nn.Module):
    """A model, with the sum of its weights at some steps of its training, which are in its state.

    So a checkpoint has all that the mean needs, and a training that continues ends with the same one.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.count = 0
        self.sums: dict[str, Tensor] = {}

    def forward(self, **inputs: Any) -> Any:
        """Return what the model returns."""
        return self.model(**inputs)

    @torch.no_grad()
    def add(self) -> None:
        """Add the weights of this step."""
        self.count += 1
        for name, weight in self.model.named_parameters():
            self.sums[name] = weight.double() + self.sums.get(name, 0)

    @torch.no_grad()
    def take_mean(self) -> None:
        """Give the model the mean of the weights that were added."""
        for name, weight in self.model.named_parameters():
            weight.copy_(self.sums[name] / self.count)

    def get_extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides the weights."""
        return {"count": self.count, "sums": self.sums}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from what a checkpoint kept."""
        self.count, self.sums = state["count"], state["sums"]
