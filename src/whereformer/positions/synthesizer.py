"""Synthetic attention: scores from positions or from one token alone (Tay et al. 2020, Synthesizer)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..kernels.cpu.products import linear
from ..kernels.terms import DenseBias, FactorPair, Term
from .base import ModelShape, Place, Position, table_rows

VARIANTS = ("random", "factorized_random", "dense", "factorized_dense")
CONTENT = ("none", "add", "mix")
TILINGS = ("pairs", "tile")


class Synthesizer(Position):
    """Scores that are trained (random) or computed from the query's token (dense), instead of query . key.

    Per head h, with x_i the layer's input at the query, absolute positions i and j, and n = max_length:

    - "random": ``R[h, i, j]``.
    - "factorized_random": ``<R1[h, i], R2[h, j]>`` of rank ``rank``.
    - "dense": ``relu(x_i W1[h] + b1[h]) . W2[:, j] + b2[j]``, the second layer shared by the heads.
    - "factorized_dense": ``A[h, i, j mod a] * B[h, i, j div a]`` with A and B linear in x_i and a * b = n.

    Args:
        variant: one of the above.
        content: "none" replaces query . key; "add" adds to it; "mix" takes ``(1 - s) content + s synthetic`` with a
            trained ``s = sigmoid(alpha)`` per layer, one half at the start.
        rank: of "factorized_random"; 8 in the paper.
        tiling: of "factorized_dense", how the paper's "tile" is read: "pairs" as above, so that no two j share a
            score; "tile" repeats both vectors, ``A[h, i, j mod a] * B[h, i, j mod b]``.
    Shape (with L = num_layers, H = num_heads):
        random: (L, H, n, n), Glorot uniform over all H rows at once. query_factors: (L, H, n, rank) and key_factors
        (L, H, rank, n), Glorot uniform. dense: first (L, H * head_dim, hidden_size), second (L, head_dim, n) and
        their biases; factorized_dense: first and second (L, H * a or b, hidden_size) and biases; weights with
        variance 1 / fan-in, biases 0. alpha: (L,), 0.
    Extrapolation: none; a position from max_length on raises :class:`PositionRangeError`.
    Source: Tay et al. (2020), arXiv 2005.00743; tensorflow/mesh ``synthetic_attention`` and Long Range Arena. Where
        that code departs from the paper (factors that ignore the query, heads mixed up by a reshape) the paper holds.
    """

    def __init__(
        self,
        model: ModelShape,
        *,
        variant: str = "random",
        content: str = "none",
        rank: int = 8,
        tiling: str = "pairs",
    ) -> None:
        super().__init__(model)
        if variant not in VARIANTS:
            raise InputError("variant", f"expected one of {', '.join(VARIANTS)}, got {variant!r}")
        if content not in CONTENT:
            raise InputError("content", f"expected one of {', '.join(CONTENT)}, got {content!r}")
        if tiling not in TILINGS:
            raise InputError("tiling", f"expected one of {', '.join(TILINGS)}, got {tiling!r}")
        if rank < 1:
            raise InputError("rank", f"expected at least 1, got {rank}")
        self.variant = variant
        self.mode = content
        self.tiling = tiling
        self.content = content != "none"
        layers, heads, n = model.num_layers, model.num_heads, model.max_length

        def parameter(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(layers, *size))

        if variant == "random":
            self.random = parameter(heads, n, n)
        elif variant == "factorized_random":
            self.query_factors = parameter(heads, n, rank)
            self.key_factors = parameter(heads, rank, n)
        elif variant == "dense":
            self.first = parameter(heads * model.head_dim, model.hidden_size)
            self.first_bias = parameter(heads * model.head_dim)
            self.second = parameter(model.head_dim, n)
            self.second_bias = parameter(n)
        else:
            # a * b = n with a and b as equal as can be: the fewest parameters.
            self.near = next(a for a in range(1, n + 1) if n % a == 0 and a * a >= n)
            self.far = n // self.near
            self.first = parameter(heads * self.near, model.hidden_size)
            self.first_bias = parameter(heads * self.near)
            self.second = parameter(heads * self.far, model.hidden_size)
            self.second_bias = parameter(heads * self.far)
        if content == "mix":
            self.alpha = parameter()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        heads, n = self.model.num_heads, self.model.max_length
        if self.variant == "random":
            bound = (6 / (heads * n + n * n)) ** 0.5
            nn.init.uniform_(self.random, -bound, bound)
        elif self.variant == "factorized_random":
            rank = self.query_factors.shape[-1]
            bound = (6 / (rank * (heads + n))) ** 0.5
            nn.init.uniform_(self.query_factors, -bound, bound)
            nn.init.uniform_(self.key_factors, -bound, bound)
        else:
            nn.init.normal_(self.first, 0.0, self.first.shape[-1] ** -0.5)
            fan_in = self.second.shape[1] if self.variant == "dense" else self.second.shape[2]
            nn.init.normal_(self.second, 0.0, fan_in**-0.5)
            nn.init.zeros_(self.first_bias)
            nn.init.zeros_(self.second_bias)
        if self.mode == "mix":
            nn.init.zeros_(self.alpha)

    def rotate(self, query: Tensor, key: Tensor, value: Tensor, place: Place) -> tuple[Tensor, Tensor, Tensor]:
        if self.mode == "mix":
            query = query * (1 - torch.sigmoid(self.alpha[place.layer])).to(query.dtype)
        return query, key, value

    def terms(self, hidden: Tensor, place: Place) -> tuple[Term, ...]:
        n = self.model.max_length
        rows = torch.atleast_2d(table_rows(place.queries, n, "synthesizer", hidden.device))
        columns = torch.atleast_2d(table_rows(place.keys, n, "synthesizer", hidden.device))
        share = torch.sigmoid(self.alpha[place.layer]) if self.mode == "mix" else 1.0
        if self.variant == "random":
            scores = self.random[place.layer][:, rows.unsqueeze(-1), columns.unsqueeze(-2)].transpose(0, 1)
            return (DenseBias(share * scores),)
        if self.variant == "factorized_random":
            query_factors = self.query_factors[place.layer][:, rows].transpose(0, 1)
            key_factors = self.key_factors[place.layer].mT[:, columns].transpose(0, 1)
            return (FactorPair(share * query_factors, key_factors),)
        first = linear(hidden, self.first[place.layer], self.first_bias[place.layer])
        first = first.unflatten(-1, (self.model.num_heads, -1)).transpose(1, 2)  # (batch, heads, n_q, a or head_dim)
        if self.variant == "dense":
            units = torch.relu(first)
            query_factors = torch.cat((units, torch.ones_like(units[..., :1])), -1)
            key_factors = torch.cat((self.second[place.layer], self.second_bias[place.layer].unsqueeze(0))).mT[columns]
            key_factors = key_factors.unsqueeze(1).expand(-1, self.model.num_heads, -1, -1)
            return (FactorPair(share * query_factors, key_factors),)
        second = linear(hidden, self.second[place.layer], self.second_bias[place.layer])
        second = second.unflatten(-1, (self.model.num_heads, -1)).transpose(1, 2)
        columns = columns[:, None, None].expand(len(hidden), self.model.num_heads, hidden.shape[1], -1)
        far_columns = columns // self.near if self.tiling == "pairs" else columns % self.far
        return (DenseBias(share * first.gather(-1, columns % self.near) * second.gather(-1, far_columns)),)
