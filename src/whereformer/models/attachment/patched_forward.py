"""``PatchedForward``: replaces one method of a layer by a function that passes its position scores to attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...kernels import Term
from .masks import Mask


@dataclass(eq=False)
class PatchedForward:
    """Replaces one method of a layer, mostly its ``forward``, with the same arguments and the same results.

    Args:
        layer: the layer; its class, its parameters and its hooks do not change.
        config: the configuration of the model around it, which names the attention function.
        function: computes the method; it gets this object, then the method's own arguments.
    """

    layer: Any
    config: PreTrainedConfig
    function: Callable[..., object]

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.function(self, *args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: tuple[Term, ...],
        mask: Mask,
        *,
        dropout: float,
        **options: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with the layer's terms and the attached method's terms.

        Args:
            query: (batch, heads, n, head_dim).
            key, value: (batch, key_heads, n, head_dim); key_heads divides heads.
            terms: the scores of the layer's own positions.
            mask: a mask for the attention function of transformers.
            dropout: the probability of dropping a weight in training.
            options: further arguments of the attention function. By default, later keys are not masked.

        Returns:
            (batch, n, heads * head_dim), and the weights (batch, heads, n, n) if the model returns them.
        """
        options = {"is_causal": False, "whereformer_terms": terms, **options}
        options["dropout"] = dropout if self.layer.training else 0.0
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = attend(self.layer, query, key, value, mask, **options)
        return out.flatten(2), weights


def is_patched(layer: nn.Module) -> bool:
    """Whether this library computes a layer's forward."""
    return isinstance(vars(layer).get("forward"), PatchedForward)


def split_heads(hidden: Tensor, heads: int) -> Tensor:
    """Divide (batch, n, heads * head_dim) into (batch, heads, n, head_dim)."""
    return hidden.unflatten(2, (heads, -1)).transpose(1, 2)


def project_heads(hidden: Tensor, heads: int, *projections: nn.Module) -> tuple[Tensor, ...]:
    """Project (batch, n, hidden_size) several times, into (batch, heads, n, head_dim) each."""
    return tuple(split_heads(project(hidden), heads) for project in projections)
