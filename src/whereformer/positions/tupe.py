"""TUPE: untied positional attention with a separate [CLS] (Ke et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..kernels.terms import FactorPair, PositionsLike, Term
from .base import ModelShape, PositionMethod, table_rows
from .site import Site


class Tupe(PositionMethod):
    """Adds scores between positions to the scores between words, in every layer.

    With ``P = layer_norm(table)``, ``score_ij += <P_i W_Q, P_j W_K> / sqrt(2 head_dim)`` per head, one table and one
    pair of projections for all layers, and the words' query . key is divided by ``sqrt(2 head_dim)``, too. [CLS], the
    token at position 0, is untied: its row has one number per head, and so has its column. The authors' code computes
    these numbers from two table rows instead of training them separately, and so does this class. ``tupe`` is TUPE-A;
    ``tupe+t5`` is TUPE-R.

    The scores have low rank, so the term holds factors and no (n, n) matrix; [CLS] needs two further features.

    Shape:
        table: (max_length + 1, hidden_size), normal with standard deviation ``initializer_range``. Row i + 1 belongs to
            token i; row 0 serves only to compute [CLS]'s row.
        norm: layer norm over hidden_size, eps 1e-5.
        query, key: linear hidden_size -> num_heads * head_dim, drawn in the same way, biases 0.
    Extrapolation: none; positions of max_length and above raise :class:`PositionRangeError`.
    Source: Ke, He & Liu (2021), arXiv 2006.15595; guolinke/TUPE.
    """

    paper, year = "Ke et al.", 2021
    acts_on = frozenset({"scores"})
    extrapolates = False
    accepts_fractional = False
    needs_query_key = True
    options_for_others: ClassVar[Mapping[str, object]] = MappingProxyType({"reset_cls": True})

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.table = nn.Parameter(torch.empty(model.max_length + 1, model.hidden_size))
        self.norm = nn.LayerNorm(model.hidden_size, eps=1e-5)
        self.query = nn.Linear(model.hidden_size, model.num_heads * model.head_dim)
        self.key = nn.Linear(model.hidden_size, model.num_heads * model.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.table, self.query.weight, self.key.weight):
            nn.init.normal_(weight, 0.0, self.model.initializer_range)
        for bias in (self.query.bias, self.key.bias, self.norm.bias):
            nn.init.zeros_(bias)
        nn.init.ones_(self.norm.weight)

    def vectors(self, positions: PositionsLike, device: torch.device | str | None = None) -> Tensor:
        return self.table[1:][table_rows(positions, len(self.table) - 1, "tupe", self.table.device)].to(device)

    def compute_shared(self, site: Site) -> FactorPair:
        """Return the term that all layers share: a row of both tables for each token."""
        # Look the rows up first, so that positions without a row raise an error before anything is projected.
        rows, device = len(self.table) - 1, self.table.device
        query_rows = table_rows(site.query_positions, rows, "tupe", device, site.min_position)
        key_rows = table_rows(site.key_positions, rows, "tupe", device, site.min_position)
        # Scaled queries and keys, each of shape (max_length + 1, heads, head_dim)
        heads, table = (self.model.num_heads, self.model.head_dim), self.norm(self.table)
        query_table = self.query(table).unflatten(-1, heads) * (2 * self.model.head_dim) ** -0.5
        key_table = self.key(table).unflatten(-1, heads)
        from_cls, to_cls = (query_table[:2] * key_table[:2]).sum(-1)  # theta 1 and theta 2, each of shape (heads,)
        query_is_cls = (query_rows == 0).to(self.table.dtype)[..., None, None]
        key_is_cls = (key_rows == 0).to(self.table.dtype)[..., None, None]
        ones = torch.ones_like(key_is_cls)
        query_factors = (
            (1 - query_is_cls) * query_table[1:][query_rows],
            (1 - query_is_cls) * to_cls[:, None],
            query_is_cls * from_cls[:, None],
        )
        head_is_cls = key_is_cls.expand(*key_is_cls.shape[:-2], self.model.num_heads, 1)
        key_factors = ((1 - key_is_cls) * key_table[1:][key_rows], head_is_cls, ones.expand_as(head_is_cls))
        pair = (torch.cat(factors, -1).transpose(-2, -3) for factors in (query_factors, key_factors))
        return FactorPair(*(factors if factors.dim() == 4 else factors.unsqueeze(0) for factors in pair))

    def transform_qkv(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        # The score is a sum of two products, so each is divided by sqrt(2 head_dim) instead of sqrt(head_dim).
        return query * 2**-0.5, key, value

    def terms(self, hidden: Tensor, site: Site) -> tuple[Term, ...]:
        return (self.get_shared(site),)
