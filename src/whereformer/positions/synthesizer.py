"""Synthesizer: scores that come from positions, or from the query's token alone (Tay et al. 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import InputError
from ..kernels.terms import DenseBias, FactorPair, Term
from .base import ModelShape, Position, table_rows
from .site import Site

VARIANTS = ("random", "factorized_random", "dense", "factorized_dense")
CONTENT = ("none", "add", "mix")
TILINGS = ("pairs", "tile")
MIXTURES = ("softmax", "sum")


class Synthesizer(Position):
    """Scores that are trained (random) or computed from the query's token (dense), instead of query . key.

    Per head h, with x_i the layer's input at the query, absolute positions i and j, and n = max_length:

    - "random": ``R[h, i, j]``.
    - "factorized_random": ``<R1[h, i], R2[h, j]>`` of rank ``rank``.
    - "dense": ``relu(x_i W1[h] + b1[h]) . W2[:, j] + b2[j]``, the second layer shared by the heads.
    - "factorized_dense": ``A[h, i, j mod a] * B[h, i, j div a]`` with A and B linear in x_i and a * b = n; the two are
      as close as possible, and a is the larger. The paper has a < b, which with "pairs" is a different function.

    Several of them, as in "random+dense", are either weighted by a softmax over trained numbers per layer, which start
    out equal (the paper's mixture), or summed (as in Long Range Arena).

    Args:
        variant: one of the above, or several joined by "+".
        content: "none" replaces query . key; "add" adds to it; "mix" takes ``(1 - s) content + s synthetic`` with a
            trained ``s = sigmoid(alpha)`` per layer, one half at the start. In a softmax mixture, query . key is one
            more part, whose number is 0.
        rank: the rank of "factorized_random"; 8 in the paper.
        tiling: how "factorized_dense" reads the paper's "tile": "pairs", as above, gives every j a score of its own;
            "tile" repeats both vectors, ``A[h, i, j mod a] * B[h, i, j mod b]``.
        mixture: how to join several variants: "softmax" or "sum".
    Shape (with L = num_layers, H = num_heads):
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
    acts_on = frozenset({"scores"})
    extrapolates = False
    fractional = False

    random: nn.Parameter
    query_factors: nn.Parameter
    key_factors: nn.Parameter
    first: nn.Parameter
    first_bias: nn.Parameter
    second: nn.Parameter
    second_bias: nn.Parameter
    near: nn.Parameter
    near_bias: nn.Parameter
    far: nn.Parameter
    far_bias: nn.Parameter

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
        if not isinstance(variant, str):
            raise InputError("variant", f"expected one of {', '.join(VARIANTS)}, or several with '+', got {variant!r}")
        self.variants = tuple(part.strip() for part in variant.split("+"))
        for part in self.variants:
            if part not in VARIANTS:
                raise InputError("variant", f"expected one of {', '.join(VARIANTS)}, or several with '+', got {part!r}")
        if len(set(self.variants)) < len(self.variants):
            raise InputError("variant", f"{variant!r} names one twice")
        for name, value, known in (
            ("content", content, CONTENT),
            ("tiling", tiling, TILINGS),
            ("mixture", mixture, MIXTURES),
        ):
            if value not in known:
                raise InputError(name, f"expected one of {', '.join(known)}, got {value!r}")
        if rank < 1:
            raise InputError("rank", f"expected at least 1, got {rank}")
        n = model.max_length
        # This choice has the fewest parameters.
        self.far_size = next(b for b in range(math.isqrt(n), 0, -1) if n % b == 0)
        self.near_size = n // self.far_size
        self.mode = content
        self.tiling = tiling
        self.content = content != "none"
        self.weighted = len(self.variants) > 1 and mixture == "softmax"
        for part in self.variants:
            for name, size in self._sizes(part, rank).items():
                setattr(self, name, nn.Parameter(torch.empty(model.num_layers, *size)))
        self.alpha = None
        if self.weighted or content == "mix":
            weights = (len(self.variants),) if self.weighted else ()
            self.alpha = nn.Parameter(torch.empty(model.num_layers, *weights))
        self.reset_parameters()

    def _sizes(self, variant: str, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a variant's parameters by name, without the axis of layers."""
        model = self.model
        heads, n, width = model.num_heads, model.max_length, model.hidden_size
        match variant:
            case "random":
                return {"random": (heads, n, n)}
            case "factorized_random":
                return {"query_factors": (heads, n, rank), "key_factors": (heads, rank, n)}
            case "dense":
                units = heads * model.head_dim
                return {
                    "first": (units, width),
                    "first_bias": (units,),
                    "second": (model.head_dim, n),
                    "second_bias": (n,),
                }
        near, far = heads * self.near_size, heads * self.far_size
        return {"near": (near, width), "near_bias": (near,), "far": (far, width), "far_bias": (far,)}

    def reset_parameters(self) -> None:
        heads, n = self.model.num_heads, self.model.max_length
        if "random" in self.variants:
            bound = (6 / (heads * n + n * n)) ** 0.5
            nn.init.uniform_(self.random, -bound, bound)
        if "factorized_random" in self.variants:
            rank = self.query_factors.shape[-1]
            bound = (6 / (rank * (heads + n))) ** 0.5
            nn.init.uniform_(self.query_factors, -bound, bound)
            nn.init.uniform_(self.key_factors, -bound, bound)
        if "dense" in self.variants:
            nn.init.normal_(self.first, 0.0, self.first.shape[-1] ** -0.5)
            nn.init.normal_(self.second, 0.0, self.second.shape[1] ** -0.5)
            nn.init.zeros_(self.first_bias)
            nn.init.zeros_(self.second_bias)
        if "factorized_dense" in self.variants:
            for weight, bias in ((self.near, self.near_bias), (self.far, self.far_bias)):
                nn.init.normal_(weight, 0.0, weight.shape[-1] ** -0.5)
                nn.init.zeros_(bias)
        if self.alpha is not None:
            nn.init.zeros_(self.alpha)

    def rotate(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        if self.mode == "mix":
            share = self._shares(site.layer)[0]
            assert isinstance(share, Tensor)
            query = query * share.to(query.dtype)
        return query, key, value

    def terms(self, hidden: Tensor, site: Site) -> tuple[Term, ...]:
        n = self.model.max_length
        rows = torch.atleast_2d(table_rows(site.queries, n, "synthesizer", hidden.device, least=site.least))
        columns = torch.atleast_2d(table_rows(site.keys, n, "synthesizer", hidden.device, least=site.least))
        shares = self._shares(site.layer)[-len(self.variants) :]
        return tuple(
            self._term(variant, hidden, rows, columns, site.layer, share)
            for variant, share in zip(self.variants, shares, strict=True)
        )

    def _shares(self, layer: int) -> list[Tensor | float]:
        """Return the factor of each part of the scores: of query . key where it is mixed in, then of each variant."""
        if self.alpha is None:
            return [1.0] * len(self.variants)
        alpha = self.alpha[layer]
        if not self.weighted:
            share = torch.sigmoid(alpha)
            return [1 - share, *[share] * len(self.variants)]
        if self.mode == "mix":
            alpha = functional.pad(alpha, (1, 0))
        return list(alpha.softmax(-1))

    def _term(
        self, variant: str, hidden: Tensor, rows: Tensor, columns: Tensor, layer: int, share: Tensor | float
    ) -> Term:
        """Return the scores of one variant. ``rows`` and ``columns`` (1 or batch, n) are indices into its tables."""
        if variant == "random":
            scores = self.random[layer][:, rows.unsqueeze(-1), columns.unsqueeze(-2)].transpose(0, 1)
            return DenseBias(share * scores)
        if variant == "factorized_random":
            query_factors = self.query_factors[layer][:, rows].transpose(0, 1)
            key_factors = self.key_factors[layer].mT[:, columns].transpose(0, 1)
            return FactorPair(share * query_factors, key_factors)
        if variant == "dense":
            units = torch.relu(self._of_heads(hidden, self.first[layer], self.first_bias[layer]))
            query_factors = torch.cat((units, torch.ones_like(units[..., :1])), -1)
            key_factors = torch.cat((self.second[layer], self.second_bias[layer].unsqueeze(0))).mT[columns]
            return FactorPair(share * query_factors, key_factors.unsqueeze(1).expand(-1, self.model.num_heads, -1, -1))
        near = self._of_heads(hidden, self.near[layer], self.near_bias[layer])
        far = self._of_heads(hidden, self.far[layer], self.far_bias[layer])
        columns = columns[:, None, None].expand(hidden.shape[0], self.model.num_heads, hidden.shape[1], -1)
        far_columns = columns // self.near_size if self.tiling == "pairs" else columns % self.far_size
        return DenseBias(share * near.gather(-1, columns % self.near_size) * far.gather(-1, far_columns))

    def _of_heads(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Apply a linear map to the queries' input and split it by head: (batch, heads, n_q, features)."""
        self.check_hidden(hidden)
        return functional.linear(hidden, weight, bias).unflatten(-1, (self.model.num_heads, -1)).transpose(1, 2)
