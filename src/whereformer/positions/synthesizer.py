"""Synthesizer: scores that depend on positions, or on the query's token only (Tay et al. 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..checks import check_choice
from ..errors import InputError
from ..kernels.terms import DenseBias, FactorPair, Term
from .base import ModelShape, PositionMethod, check_min, table_rows
from .site import Site

VARIANTS = ("random", "factorized_random", "dense", "factorized_dense")


class Synthesizer(PositionMethod):
    """Scores that are trained (random) or computed from the query's token (dense), instead of query . key.

    Per head h, with x_i the layer's input at the query, absolute positions i and j, and n = max_length:

    - "random": ``R[h, i, j]``.
    - "factorized_random": ``<R1[h, i], R2[h, j]>`` of rank ``rank``.
    - "dense": ``relu(x_i W1[h] + b1[h]) . W2[:, j] + b2[j]``, the second layer shared by the heads.
    - "factorized_dense": ``A[h, i, j mod a] * B[h, i, j div a]`` with A and B linear in x_i and a * b = n. a and b are
      as close as possible, and a is the larger one. The paper has a < b, which with "pairs" is a different function.

    Several variants, as in "random+dense", are either weighted by a softmax over trained numbers per layer, which are
    equal at the start (the paper's mixture), or summed (as in Long Range Arena).

    Args:
        variant: one of these variants, or several joined by "+".
        content: "none" replaces query . key; "add" adds to it; "mix" computes ``(1 - s) content + s synthetic`` with a
            trained ``s = sigmoid(alpha)`` per layer, one half at the start. In a softmax mixture, query . key is a
            further part, with the constant number 0.
        rank: the rank of "factorized_random"; 8 in the paper.
        tiling: how "factorized_dense" interprets the paper's "tile": "pairs", as above, gives every j a separate score;
            "tile" repeats both vectors, ``A[h, i, j mod a] * B[h, i, j mod b]``.
        mixture: how to join several variants: "softmax" or "sum".
    Shape (with L = num_layers, H = num_heads), in ``tables``:
        random: (L, H, n, n), Glorot uniform over all H rows at once. query_factors: (L, H, n, rank) and key_factors (L,
            H, rank, n), Glorot uniform. dense: first (L, H * head_dim, hidden_size), second (L, head_dim, n) and their
            biases; factorized_dense: near (L, H * a, hidden_size), far (L, H * b, hidden_size) and their biases;
            weights with variance 1 / fan-in, biases 0. alpha: (L,), in a softmax mixture (L, variants); 0.
    Extrapolation: none; positions of max_length and above raise :class:`PositionRangeError`.
    Source: Tay et al. (2020), arXiv 2005.00743; tensorflow/mesh ``synthetic_attention`` and Long Range Arena. Where
        that code departs from the paper (factors that ignore the query, heads mixed up by a reshape), this class
        follows the paper.
    """

    paper, year = "Tay et al.", 2020
    rotates_any_heads = True
    acts_on = frozenset({"scores"})
    extrapolates = False
    accepts_fractional = False

    def __init__(
        self,
        model: ModelShape,
        *,
        variant: str = "random",
        content: str = "none",
        rank: int = 8,
        tiling: str = "pairs",
        mixture: str = "softmax",
    ) -> None:
        super().__init__(model)
        self.variants = tuple(part.strip() for part in variant.split("+"))
        for part in self.variants:
            check_choice("variant", part, VARIANTS)
        if len(set(self.variants)) < len(self.variants):
            raise InputError("variant", f"{variant!r} names a variant twice")
        check_choice("content", content, ("none", "add", "mix"))
        check_choice("tiling", tiling, ("pairs", "tile"))
        check_choice("mixture", mixture, ("softmax", "sum"))
        check_min(1, rank=rank)
        n = model.max_length
        # b as close to a as possible has the fewest parameters.
        self.far_size = next(b for b in range(math.isqrt(n), 0, -1) if n % b == 0)
        self.near_size = n // self.far_size
        self.content, self.tiling, self.rank = content, tiling, rank
        self.uses_query_key, self.needs_query_key = content != "none", content == "mix"
        self.is_weighted = len(self.variants) > 1 and mixture == "softmax"
        shapes = {name: shape for part in self.variants for name, (shape, _) in self._table_shapes(part).items()}
        self.tables = nn.ParameterDict({name: torch.empty(model.num_layers, *shape) for name, shape in shapes.items()})
        self.alpha = None
        if self.is_weighted or content == "mix":
            weights = (len(self.variants),) if self.is_weighted else ()
            self.alpha = nn.Parameter(torch.empty(model.num_layers, *weights))
        self.reset_parameters()

    def _table_shapes(self, variant: str) -> dict[str, tuple[tuple[int, ...], float]]:
        """Return the shape of each of a variant's tables, without the axis of layers, and its initial scale.

        The scale is the bound of a uniform distribution for the random variants, the standard deviation of a normal
        distribution for the dense ones.
        """
        heads, n, width, rank = self.model.num_heads, self.model.max_length, self.model.hidden_size, self.rank
        if variant == "random":
            return {"random": ((heads, n, n), (6 / (heads * n + n * n)) ** 0.5)}
        if variant == "factorized_random":
            bound = (6 / (rank * (heads + n))) ** 0.5
            return {"query_factors": ((heads, n, rank), bound), "key_factors": ((heads, rank, n), bound)}
        units = self.model.head_dim
        num_rows = {"first": units} if variant == "dense" else {"near": self.near_size, "far": self.far_size}
        shapes: dict[str, tuple[tuple[int, ...], float]] = {}
        for name, rows in num_rows.items():
            shapes |= {name: ((heads * rows, width), width**-0.5), f"{name}_bias": ((heads * rows,), 0.0)}
        if variant == "dense":
            shapes |= {"second": ((units, n), units**-0.5), "second_bias": ((n,), 0.0)}
        return shapes

    def reset_parameters(self) -> None:
        for variant in self.variants:
            for name, (_, scale) in self._table_shapes(variant).items():
                if variant in ("random", "factorized_random"):
                    nn.init.uniform_(self.tables[name], -scale, scale)
                else:
                    nn.init.normal_(self.tables[name], 0.0, scale)
        if self.alpha is not None:
            nn.init.zeros_(self.alpha)

    def transform_qkv(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        if self.content == "mix":
            weight = self._mixture_weights(site.layer)[0]
            assert isinstance(weight, Tensor)
            query = query * weight.to(query.dtype)
        return query, key, value

    def terms(self, hidden: Tensor, site: Site) -> tuple[Term, ...]:
        rows, columns = (
            torch.atleast_2d(
                table_rows(positions, self.model.max_length, "synthesizer", hidden.device, site.min_position)
            )
            for positions in (site.query_positions, site.key_positions)
        )
        weights = self._mixture_weights(site.layer)[-len(self.variants) :]
        return tuple(
            self._term(variant, hidden, rows, columns, site.layer, weight)
            for variant, weight in zip(self.variants, weights, strict=True)
        )

    def _mixture_weights(self, layer: int) -> list[Tensor | float]:
        """Return the factor on each part of the scores: on query . key if it is mixed in, then on each variant."""
        if self.alpha is None:
            return [1.0] * len(self.variants)
        alpha = self.alpha[layer]
        if not self.is_weighted:
            weight = torch.sigmoid(alpha)
            return [1 - weight, *[weight] * len(self.variants)]
        if self.content == "mix":
            alpha = functional.pad(alpha, (1, 0))
        return list(alpha.softmax(-1))

    def _term(
        self, variant: str, hidden: Tensor, rows: Tensor, columns: Tensor, layer: int, weight: Tensor | float
    ) -> Term:
        """Return the scores of one variant. ``rows`` and ``columns`` (1 or batch, n) are indices into its tables."""
        tables = {name: self.tables[name][layer] for name in self._table_shapes(variant)}
        if variant == "random":
            scores = tables["random"][:, rows.unsqueeze(-1), columns.unsqueeze(-2)].transpose(0, 1)
            return DenseBias(weight * scores)
        if variant == "factorized_random":
            query_factors = tables["query_factors"][:, rows].transpose(0, 1)
            key_factors = tables["key_factors"].mT[:, columns].transpose(0, 1)
            return FactorPair(weight * query_factors, key_factors)
        if variant == "dense":
            units = torch.relu(self._project(hidden, tables["first"], tables["first_bias"]))
            query_factors = torch.cat((units, torch.ones_like(units[..., :1])), -1)
            key_factors = torch.cat((tables["second"], tables["second_bias"].unsqueeze(0))).mT[columns]
            return FactorPair(weight * query_factors, key_factors.unsqueeze(1).expand(-1, self.model.num_heads, -1, -1))
        near = self._project(hidden, tables["near"], tables["near_bias"])
        far = self._project(hidden, tables["far"], tables["far_bias"])
        columns = columns[:, None, None].expand(hidden.shape[0], self.model.num_heads, hidden.shape[1], -1)
        far_columns = columns // self.near_size if self.tiling == "pairs" else columns % self.far_size
        return DenseBias(weight * near.gather(-1, columns % self.near_size) * far.gather(-1, far_columns))

    def _project(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Apply a linear map to the queries' hidden states and split it by head: (batch, heads, n_q, features)."""
        self.check_hidden(hidden)
        return functional.linear(hidden, weight, bias).unflatten(-1, (self.model.num_heads, -1)).transpose(1, 2)
