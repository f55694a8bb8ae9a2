"""Scores that grow with the logarithm of the number of keys, so that attention stays sharp on long text."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import InputError
from ..kernels.terms import Positions, position_values
from .base import ModelShape, Place, Position, float_dtype

KINDS = ("ssmax", "su", "llama4", "inkling")


class Logn(Position):
    """Multiplies the query by a factor that grows with the logarithm of the number of keys that it sees.

    With n keys, softmax spreads its weight ever thinner as n grows; a larger product of query and key makes up for it.
    The method tells nothing about order, so it is usually joined with one that does: ``rope+logn``. With m for
    ``train_length``, the factor is

    - "ssmax": ``s * log(n)``, with a trained s per head and layer;
    - "su": ``log(n) / log(m)`` for n above m, else 1;
    - "llama4": ``1 + alpha * log(floor(n / m) + 1)``;
    - "inkling": ``1 + alpha * log(n / m)`` for n above m, else 1.

    n is the number of keys that the query may attend to: the real tokens of its document and, in a causal model, only
    those at its position or before. So padding changes nothing. A window is not counted. Where some layers have one,
    join ``logn`` in the others, as in ``rope/rope/rope/rope+logn``.

    The query is multiplied before any other method changes it. So the factor reaches query . key, and the products of
    the query with the vectors of a joined method such as shaw, cope or transformer_xl. Numbers that the query has no
    part in stay as they are: the biases of t5, tisa or alibi, transformer_xl's own, and deberta's product of key and
    offset.

    Args:
        kind: one of the four factors.
        train_length: the length of the texts in training, m; for all kinds but "ssmax". Llama 4 has 8192.
        alpha: the growth of "llama4" and "inkling"; both models have 0.1.
    Shape:
        s: (num_layers, num_heads) for "ssmax", at first 1 / log(max_length), so that a text of ``max_length`` begins as
            in plain attention.
    Extrapolation: any length; this is what the method was made for.
    Source: "ssmax": Nakanishi (2025), arXiv 2501.19399, eq. 3. "su": Su (2021), https://kexue.fm/archives/8823, with
        Qwen's rule that shorter texts stay as they are. "llama4": Llama 4's attention in layers without rotations.
        "inkling": the attention of Inkling's layers without windows.
    """

    needs_content = True
    scales_query = True
    # Not for their numbers: with a cache, ``rotate`` would otherwise be told of the new keys alone.
    reads_keys = True

    def __init__(
        self, model: ModelShape, *, kind: str = "ssmax", train_length: int | None = None, alpha: float = 0.1
    ) -> None:
        super().__init__(model)
        if kind not in KINDS:
            raise InputError("kind", f"expected one of {', '.join(KINDS)}, got {kind!r}")
        if kind == "ssmax" and train_length is not None:
            raise InputError("train_length", f"'ssmax' trains its factor and has none, got {train_length}")
        if kind != "ssmax" and train_length is None:
            raise InputError("train_length", f"{kind!r} needs the length of the texts in training, got None")
        if train_length is not None and train_length < 2:
            raise InputError("train_length", f"expected at least 2, got {train_length}")
        if alpha < 0:
            raise InputError("alpha", f"expected at least 0, got {alpha}")
        self.kind, self.train_length, self.alpha = kind, train_length, alpha
        self.s = nn.Parameter(torch.empty(model.num_layers, model.num_heads)) if kind == "ssmax" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.s is not None:
            nn.init.constant_(self.s, 1 / math.log(max(self.model.max_length, 2)))

    def query_factor(self, query: Tensor, place: Place) -> Tensor:
        n = visible_keys(place, causal=self.model.causal, device=query.device)
        # A row without a key has no weights that a factor could change.
        n = n.clamp(min=1).to(float_dtype(query))[:, None, :, None]
        if self.s is not None:
            return self.s[place.layer].to(n.dtype)[:, None, None] * n.log()
        assert self.train_length is not None
        if self.kind == "su":
            return n.log().clamp(min=math.log(self.train_length)) / math.log(self.train_length)
        if self.kind == "llama4":
            return 1 + self.alpha * torch.log1p((n / self.train_length).floor())
        return inkling_growth(n, self.train_length, self.alpha)

    def rotate(self, query: Tensor, key: Tensor, value: Tensor, place: Place) -> tuple[Tensor, Tensor, Tensor]:
        factor = self.query_factor(query, place)
        return (query * factor).to(query.dtype), key, value


def inkling_growth(n: Tensor, length: int, alpha: float) -> Tensor:
    """Return Inkling's factor for n keys."""
    return 1 + alpha * (n / length).clamp(min=1).log()


def visible_keys(place: Place, *, causal: bool, device: torch.device) -> Tensor:
    """Count the keys that each query may attend to, (1 or batch, n_q) int64, in O(n log n) and without all pairs.

    These are the real keys of the query's document; if ``causal``, those at its position or before.
    """
    mask = None if place.key_mask is None else place.key_mask.to(torch.int64)
    queries, keys = (torch.atleast_2d(position_values(at, device)) for at in (place.queries, place.keys))
    if place.query_documents is None or place.key_documents is None:
        if not causal:
            total = torch.full((1, 1), keys.shape[-1], device=device) if mask is None else mask.sum(-1, keepdim=True)
            return total.expand(-1, queries.shape[-1])
        if isinstance(place.keys, Positions) and mask is None:
            return _reached(place.keys, queries)
    ones = torch.ones_like(keys, dtype=torch.int64) if mask is None else mask
    if causal:
        found = sums_of_keys(place, torch.ones_like(ones).unsqueeze(1))[0][:, 0]
        if place.key_documents is None:
            return found
    assert place.query_documents is not None
    assert place.key_documents is not None
    batch = _common_batch(ones, place.key_documents)
    documents, order = place.key_documents.expand(batch, -1).sort(-1)
    totals = functional.pad(ones.expand(batch, -1).gather(-1, order).cumsum(-1), (1, 0))
    wanted = place.query_documents.to(documents.dtype).expand(batch, -1).contiguous()
    earlier = totals.gather(-1, torch.searchsorted(documents, wanted))
    return (found if causal else totals.gather(-1, torch.searchsorted(documents, wanted, right=True))) - earlier


def sums_of_keys(place: Place, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Sum numbers of the real keys in the order of documents and, within them, of positions.

    Args:
        place: where queries and keys are.
        numbers: (1 or batch, heads, n_k), one for each key.

    Returns:
        The sums up to each query, (1 or batch, heads, n_q), and those up to each key, itself included. Both begin with
        the first document, so differences within one document are what counts.
    """
    device = numbers.device
    queries, keys = (torch.atleast_2d(position_values(at, device)) for at in (place.queries, place.keys))
    if place.key_mask is not None:
        numbers = numbers * place.key_mask[:, None].to(numbers.dtype)
    if place.key_documents is None and isinstance(place.keys, Positions):
        sums = functional.pad(numbers.cumsum(-1), (1, 0))
        reached = _reached(place.keys, queries)
        batch = _common_batch(sums, reached)
        index = reached.unsqueeze(1).expand(batch, sums.shape[1], -1)
        return sums.expand(batch, -1, -1).gather(-1, index), sums[..., 1:]
    of_queries, of_keys = place.query_documents, place.key_documents
    if of_queries is None or of_keys is None:
        of_queries, of_keys = torch.zeros_like(queries), torch.zeros_like(keys)
    # Keys and queries in one row; a key comes before a query at its position.
    dtype = torch.promote_types(keys.dtype, queries.dtype)
    batch = _common_batch(queries, keys, of_queries, of_keys, numbers)
    at, document = (
        torch.cat([each.expand(batch, -1) for each in pair], -1)
        for pair in ((keys.to(dtype), queries.to(dtype)), (of_keys, of_queries))
    )
    order = at.argsort(dim=-1, stable=True)
    order = order.gather(-1, document.gather(-1, order).argsort(dim=-1, stable=True)).unsqueeze(1)
    order = order.expand(-1, numbers.shape[1], -1)
    row = functional.pad(numbers, (0, queries.shape[-1])).expand(batch, -1, -1)
    sums = row.gather(-1, order).cumsum(-1)
    found = torch.zeros_like(sums).scatter(-1, order, sums)
    return found[..., keys.shape[-1] :], found[..., : keys.shape[-1]]


def _common_batch(*tensors: Tensor) -> int:
    """Return the size of the first axis that tensors have, some of which have 1; it may be 0."""
    return torch.broadcast_shapes(*((tensor.shape[0],) for tensor in tensors))[0]


def _reached(keys: Positions, queries: Tensor) -> Tensor:
    """Return the number of keys at each query's position or before, like ``queries`` but int64."""
    return ((queries - keys.start).div(keys.stride, rounding_mode="floor") + 1).clamp(0, keys.length).long()
