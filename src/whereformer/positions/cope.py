"""CoPE: positions that count what a query finds on the way to a key (Golovneva et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import InputError
from ..kernels.precision import without_autocast
from ..kernels.terms import DenseBias, Positions, Term, offsets_between, position_values
from .base import ModelShape, Place, Position, float_dtype


class Cope(Position):
    """Adds the query's product with a vector of the number of keys, as the query counts them, between it and the key.

    A key counts as much as the query attends to it: ``gate_ij = sigmoid(<q_i, k_j> / sqrt(head_dim))``, or with the
    layer's own factor in place of ``1 / sqrt(head_dim)``. The count of a key is the sum of the gates from the key to
    the query's own position, both included. Then ``score_ij += <q_i, e[count]>``, not scaled, where a count between two
    whole numbers interpolates between their vectors.

    The authors' models are causal. In an encoder, keys to the right are counted from the query to the right and read
    vectors of their own; this is ours. Keys have to come in the order of their positions. Where explicit positions fall
    or stay, as where a packed document ends, counting starts anew. Padding counts as nothing.

    Counts differ for every pair, and so do the gates: memory is O(n_q n_k) per head.

    Args:
        num_positions: the vectors of each direction, for counts from 0 to num_positions - 1; larger counts look alike.
    Shape:
        left, right: (num_layers, num_positions, head_dim), zeros, shared by all heads; no right if the model is causal.
    Extrapolation: any length and any real position, of which only the order matters.
    Source: Golovneva et al. (2024), arXiv 2405.18719, eq. 3-6 and the code in its appendix.
    """

    paper, year = "Golovneva et al.", 2024
    shift_invariant = True
    needs_content = True
    reads_keys = True

    def __init__(self, model: ModelShape, *, num_positions: int = 64) -> None:
        super().__init__(model)
        if num_positions < 2:
            raise InputError("num_positions", f"expected at least 2, got {num_positions}")
        self.num_positions = num_positions
        size = (model.num_layers, num_positions, model.head_dim)
        self.left = nn.Parameter(torch.empty(size))
        self.right = None if model.causal else nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.left)
        if self.right is not None:
            nn.init.zeros_(self.right)

    def content_terms(self, query: Tensor, key: Tensor, place: Place) -> tuple[Term, ...]:
        dtype = float_dtype(query)
        queries, keys = (position_values(at, query.device) for at in (place.queries, place.keys))
        offsets = offsets_between(queries, keys)
        offsets = offsets.unsqueeze(1) if offsets.dim() == 3 else offsets
        vectors = self.left[place.layer]
        if self.right is not None:
            vectors = torch.cat((vectors, self.right[place.layer]))
        # In half precision a count of some hundreds would be rounded to whole numbers.
        with without_autocast(query.device):
            query = query.to(dtype)
            gates = torch.sigmoid(query @ key.to(dtype).mT * self.content_scale(place))
            if place.key_mask is not None:
                gates = gates * place.key_mask[:, None, None]
            counts = self._counts(gates, offsets, None if isinstance(place.keys, Positions) else keys)
            counts = counts.clamp(max=self.num_positions - 1)
            below = counts.floor()
            by_count = query @ vectors.to(dtype).mT
            first = (offsets > 0) * self.num_positions if self.right is not None else 0
            lower, upper = (by_count.gather(-1, each.long() + first) for each in (below, counts.ceil()))
            scores = torch.lerp(lower, upper, counts - below)
        return (DenseBias(scores),)

    def _counts(self, gates: Tensor, offsets: Tensor, keys: Tensor | None) -> Tensor:
        """Sum the gates (batch, heads, n_q, n_k) between each key and the query's position, both included.

        ``keys`` are the keys' positions if these may fall.
        """
        n = gates.shape[-1]
        # Sums from a key to the end, and 0 after the end
        to_end = functional.pad((gates * (offsets <= 0)).flip(-1).cumsum(-1).flip(-1), (0, 1))
        if keys is None:
            left, starts = to_end[..., :-1], None
        else:
            index = torch.arange(n, device=keys.device)
            begins = functional.pad(keys.diff() <= 0, (1, 0))
            ends = functional.pad(torch.where(begins, index, n)[..., 1:], (0, 1), value=n)
            ends = ends.flip(-1).cummin(-1).values.flip(-1)
            starts = torch.where(begins, index, 0).cummax(-1).values
            left = to_end[..., :-1] - self._at(to_end, ends)
        if self.right is None:
            return left
        from_start = functional.pad((gates * (offsets >= 0)).cumsum(-1), (1, 0))
        right = from_start[..., 1:]
        if starts is not None:
            right = right - self._at(from_start, starts)
        return torch.where(offsets > 0, right, left)

    @staticmethod
    def _at(sums: Tensor, index: Tensor) -> Tensor:
        """Return the sums (batch, heads, n_q, n) at an index of each key, (n_k,) or (batch, n_k)."""
        index = index[:, None, None] if index.dim() == 2 else index[None, None, None]
        return sums.gather(-1, index.expand(*sums.shape[:3], -1))
