"""Scores that grow with the logarithm of the number of keys, so that attention stays sharp on long text."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..checks import check_choice
from ..errors import InputError
from .base import ModelShape, PositionMethod, check_min, float_dtype
from .site import Site
from .visible_keys import count_visible_keys

KINDS = ("ssmax", "su", "llama4", "inkling")


class Logn(PositionMethod):
    """Multiplies the query by a factor that grows with the logarithm of the number of keys that it sees.

    As the number n of keys grows, softmax gives each key less weight; a larger product of query and key makes up for
    it. The method does not encode order, so it is usually joined with one that does: ``rope+logn``. With m for
    ``train_length``, the factor is

    - "ssmax": ``s * log(n)``, with a trained s per head and layer;
    - "su": ``log(n) / log(m)`` for n above m, else 1;
    - "llama4": ``1 + alpha * log(floor(n / m) + 1)``;
    - "inkling": ``1 + alpha * log(n / m)`` for n above m, else 1.

    n is the number of keys that the query may attend to: the tokens of its document without padding and, in a causal
    model, only the tokens at its position or before. A window does not change n. If some layers have a window, join
    ``logn`` in the layers without one, as in ``rope/rope/rope/rope+logn``.

    The query is multiplied before any other method changes it. So query . key has the factor, and so have the products
    of the query with the vectors of a joined method such as shaw or transformer_xl. Scores that do not depend on the
    query do not have it: the biases of t5, tisa, alibi and transformer_xl, and deberta's product of key and offset.

    Args:
        kind: one of the four factors.
        train_length: the length of the texts in training, m, for all kinds except "ssmax". Llama 4 has 8192.
        alpha: the growth of "llama4" and "inkling"; both models have 0.1.
    Shape:
        s: (num_layers, num_heads) for "ssmax", at first 1 / log(max_length), so that a text of ``max_length`` starts
            with plain attention.
    Extrapolation: any length; the method was made for this.
    Source: "ssmax": Nakanishi (2025), arXiv 2501.19399, eq. 3. "su": Su (2021), https://kexue.fm/archives/8823, with
        Qwen's rule that shorter texts have the factor 1. "llama4": Llama 4's attention in layers without rotations.
        "inkling": the attention of Inkling's layers without windows.
    """

    paper, year = "Su 2021; Nakanishi", 2025
    acts_on = frozenset({"queries"})
    shift_invariant = True
    needs_query_key = True
    rotates_any_heads = True
    scales_query = True
    # The method counts keys: with a cache, ``transform_qkv`` would otherwise receive only the new ones.
    reads_keys = True

    def __init__(
        self, model: ModelShape, *, kind: str = "ssmax", train_length: int | None = None, alpha: float = 0.1
    ) -> None:
        super().__init__(model)
        check_choice("kind", kind, KINDS)
        if kind == "ssmax" and train_length is not None:
            raise InputError("train_length", f"'ssmax' trains its factor; expected None, got {train_length}")
        if kind != "ssmax" and train_length is None:
            raise InputError("train_length", f"{kind!r} needs the length of the texts in training, got None")
        check_min(2, train_length=train_length)
        check_min(0, alpha=alpha)
        self.kind, self.train_length, self.alpha = kind, train_length, alpha
        self.s = nn.Parameter(torch.empty(model.num_layers, model.num_heads)) if kind == "ssmax" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.s is not None:
            nn.init.constant_(self.s, 1 / math.log(max(self.model.max_length, 2)))

    def query_factor(self, query: Tensor, site: Site) -> Tensor:
        n = count_visible_keys(site, causal=self.model.causal, device=query.device)
        # A query without keys has no weights that the factor could change.
        n = n.clamp(min=1).to(float_dtype(query))[:, None, :, None]
        if self.s is not None:
            return self.s[site.layer].to(n.dtype)[:, None, None] * n.log()
        assert self.train_length is not None
        if self.kind == "su":
            return n.log().clamp(min=math.log(self.train_length)) / math.log(self.train_length)
        if self.kind == "llama4":
            return 1 + self.alpha * torch.log1p((n / self.train_length).floor())
        return inkling_growth(n, self.train_length, self.alpha)


def inkling_growth(n: Tensor, length: int, alpha: float) -> Tensor:
    """Return Inkling's factor for n keys."""
    return 1 + alpha * (n / length).clamp(min=1).log()
