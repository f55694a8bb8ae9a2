"""What a model with a position method hands to its attention: the method, the layer, and what layers share.

Everything travels as keyword arguments of one forward, so that nothing is kept between forwards, and a layer that is
run again for its gradient sees what it saw before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ...kernels import Positions
from ...positions import Place, Position

NAME = "whereformer"
"""The name of the attention implementation, of each stack's position method and of the configuration's field."""

PROBE = "whereformer_probe"
"""The name of the attention implementation that notes who calls it."""


class StackForward:
    """One forward of a stack: its method, what the method shares between layers, and how many layers ran."""

    def __init__(self, position: Position, share: bool) -> None:
        self.position = position
        self.share = share
        self.calls = 0
        self.once: tuple[bool, Any] | None = None
        self.kept: tuple[Positions, Positions, Any] | None = None

    def shared(self, queries: Positions, keys: Positions) -> Any:
        """What the method computes once for all layers, made when the first asks."""
        if not self.share:
            return self.position.shared(queries, keys)
        # Reentrant checkpointing runs layers first without gradients and later again with them.
        with_gradients = torch.is_grad_enabled()
        if self.once is None or self.once[0] != with_gradients:
            self.once, self.kept = (with_gradients, self.position.once()), None
        if self.kept is None or self.kept[:-1] != (queries, keys):
            self.kept = queries, keys, self.position.shared(queries, keys, self.once[1])
        return self.kept[-1]


@dataclass(frozen=True)
class LayerInput:
    """What a self-attention layer hands to the attention function.

    Args:
        forward: the forward that the layer runs in.
        layer: its number, counted over the stack's passes.
        hidden: its input (batch, n, hidden_size).
    """

    forward: StackForward
    layer: int
    hidden: Tensor

    def place(self, n_q: int, n_k: int) -> Place:
        """Where the queries and keys are. A cache holds the keys before, so the queries are the last tokens."""
        keys = Positions(0, 1, n_k)
        queries = keys if n_q == n_k else Positions(n_k - n_q, 1, n_q)
        return Place(queries, keys, self.layer, self.forward.shared(queries, keys))


class Start:
    """A hook before a stack runs: begins a :class:`StackForward`."""

    def __init__(self, layers: list[GradientCheckpointingLayer]) -> None:
        self.layers = layers

    def __call__(
        self, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # A checkpointed layer runs again alone, and has to make again what it got from others: so it makes its own.
        share = not (stack.training and any(layer.gradient_checkpointing for layer in self.layers))
        return args, {**kwargs, "whereformer_forward": StackForward(getattr(stack, NAME), share)}


class Enter:
    """A hook before a self-attention layer runs: tells it which layer it is."""

    def __init__(self, layers: tuple[int, ...], counted: bool) -> None:
        self.layers = layers
        self.counted = counted

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        forward = kwargs.get("whereformer_forward")
        if forward is None:
            raise RuntimeError(f"whereformer: {type(module).__name__} ran outside of the model it was attached to")
        if module.config._attn_implementation not in (NAME, PROBE):
            # Another attention function would ignore the positions silently.
            raise RuntimeError(
                f"attn_implementation: a position method is attached, so it must be {NAME!r}, "
                f"got {module.config._attn_implementation!r}; set it back or call whereformer.detach(model)"
            )
        layer = self.layers[0]
        if self.counted:
            # Layers that run several times are told apart by how many ran before.
            layer = forward.calls
            forward.calls += 1
            if layer not in self.layers:
                raise RuntimeError("whereformer: layers that share weights ran in another order than when attached")
        hidden = args[0] if args else kwargs["hidden_states"]
        return args, {**kwargs, "whereformer": LayerInput(forward, layer, hidden)}
