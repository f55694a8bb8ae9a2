"""Counts and sums over the keys that a query sees, in O(n log n): padding, documents and causality are left out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels.terms import Positions, position_values
from ..kernels.tracing import can_look
from .site import Site


def places_of(real: Tensor) -> Tensor | None:
    """Return the number of real tokens before each one, (batch, n); None if these are 0 .. n - 1 for all that are real.

    Elsewhere than on the CPU, looking would stall the device.
    """
    if can_look(real) and not (real[:, 1:] & ~real[:, :-1]).any():
        return None
    return (real.cumsum(1) - 1).clamp(min=0)


def previous_real(real: Tensor) -> Tensor:
    """Return the index of the last real token before each one, (batch, n); -1 where there is none."""
    indices = torch.arange(real.shape[1], device=real.device).where(real, -1)
    return functional.pad(indices.cummax(1).values[:, :-1], (1, 0), value=-1)


def starts_of_runs(ids: Tensor) -> Tensor:
    """Return which tokens begin a run of equal ids, both (batch, n)."""
    return functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)


def places_in(documents: Tensor, real: Tensor | None = None, longest: int | None = None) -> tuple[Tensor, int]:
    """Return the number of real tokens before each one in its run of equal ids, and what none of these numbers reaches.

    All tensors are (batch, n). ``longest`` is the length of the longest run, for where looking would stall the device.
    """
    counts = torch.ones_like(documents, dtype=torch.int64) if real is None else real.expand_as(documents).long()
    counted = counts.cumsum(1)
    places = (counted - 1 - (counted - counts).where(starts_of_runs(documents), 0).cummax(1).values).clamp(min=0)
    if can_look(places) and places.numel():
        return places, int(places.max()) + 1
    return places, longest or places.shape[1]


def visible_keys(site: Site, *, causal: bool, device: torch.device) -> Tensor:
    """Count the keys that each query may attend to, (1 or batch, n_q) int64, in O(n log n) and without all pairs.

    These are the real keys of the query's document; if ``causal``, those at its position or before. Those that a cache
    has dropped count, too.
    """
    queries, keys = (torch.atleast_2d(position_values(at, device)) for at in (site.queries, site.keys))
    if not causal and site.key_documents is None:
        mask = torch.ones_like(keys) if site.key_mask is None else site.key_mask
        return mask.count_nonzero(-1).unsqueeze(-1).expand(-1, queries.shape[-1]) + site.dropped
    if not causal:
        # As causal queries behind all keys.
        site = replace(site, queries=torch.full(queries.shape, torch.inf, device=device))
    ones = torch.ones(1, 1, keys.shape[-1], dtype=torch.int64, device=device)
    return sums_of_keys(site, ones)[0][:, 0] + site.dropped


def sums_of_keys(site: Site, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Sum numbers of the real keys in the order of documents and, within them, of positions.

    Args:
        site: where queries and keys are.
        numbers: (1 or batch, heads, n_k), one for each key.

    Returns:
        The sums up to each query, (1 or batch, heads, n_q), and those up to each key, itself included. Both begin anew
        in each document.
    """
    device = numbers.device
    queries, keys = (torch.atleast_2d(position_values(at, device)) for at in (site.queries, site.keys))
    if site.key_mask is not None:
        numbers = numbers * site.key_mask[:, None].to(numbers.dtype)
    if site.key_documents is None and isinstance(site.keys, Positions):
        sums = functional.pad(numbers.cumsum(-1), (1, 0))
        reached = _reached(site.keys, queries)
        batch = _common_batch(sums, reached)
        index = reached.unsqueeze(1).expand(batch, sums.shape[1], -1)
        return sums.expand(batch, -1, -1).gather(-1, index), sums[..., 1:]
    of_queries, of_keys = site.query_documents, site.key_documents
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
    document, by_document = document.gather(-1, order).sort(dim=-1, stable=True)
    order = order.gather(-1, by_document).unsqueeze(1).expand(-1, numbers.shape[1], -1)
    row = functional.pad(numbers, (0, queries.shape[-1])).expand(batch, -1, -1).gather(-1, order)
    sums = row.cumsum(-1) if site.key_documents is None else _sums_within(document, row)
    found = torch.zeros_like(sums).scatter(-1, order, sums)
    return found[..., keys.shape[-1] :], found[..., : keys.shape[-1]]


def _sums_within(documents: Tensor, row: Tensor) -> Tensor:
    """Return the running sums of a row (batch, heads, n), which begin anew in each document; ids (batch, n) ascend."""
    first = torch.searchsorted(documents, documents).unsqueeze(1).expand_as(row)
    # Sums of the whole row lose the digits that those of a late document need. MPS has no float64.
    wide = row.double() if row.is_floating_point() and row.device.type != "mps" else row
    sums = functional.pad(wide.cumsum(-1), (1, 0))
    return (sums[..., 1:] - sums.gather(-1, first)).to(row.dtype)


def _common_batch(*tensors: Tensor) -> int:
    """Return the size of the first axis that tensors have, some of which have 1; it may be 0."""
    return torch.broadcast_shapes(*((tensor.shape[0],) for tensor in tensors))[0]


def _reached(keys: Positions, queries: Tensor) -> Tensor:
    """Return the number of keys at each query's position or before, like ``queries`` but int64."""
    return ((queries - keys.start).div(keys.stride, rounding_mode="floor") + 1).clamp(0, keys.length).long()
