"""Counts and sums over the keys that each query sees, in O(n log n), with padding, other documents and later keys
excluded."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels.terms import Positions, position_values
from ..kernels.tracing import can_read
from .site import Site


def positions_from_mask(token_mask: Tensor) -> Tensor | None:
    """Return the number of tokens before each one, (batch, n); None if these are 0 .. n - 1 for all tokens.

    Padding, where ``token_mask`` (batch, n) is False, is not counted. On other devices than the CPU the result is never
    None, because reading the mask would stall the device.
    """
    if can_read(token_mask) and not (token_mask[:, 1:] & ~token_mask[:, :-1]).any():
        return None
    return (token_mask.cumsum(1) - 1).clamp(min=0)


def steps_between_tokens(positions: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return how far each token is from the token before it: by its position, and by its index in the row.

    Both are (batch, n), and 1 for padding and for the first token of a row.

    Args:
        positions: (1 or batch, n).
        token_mask: (batch, n), False for padding between tokens, which is skipped; None: no padding.
    """
    if token_mask is None:
        steps = functional.pad(positions.diff(), (1, 0), value=1)
        return steps, torch.ones_like(steps)
    index = torch.arange(token_mask.shape[1], device=token_mask.device)
    previous = functional.pad(index.where(token_mask, -1).cummax(1).values[:, :-1], (1, 0), value=-1)
    positions, follows = positions.expand(len(token_mask), -1), token_mask & (previous >= 0)
    steps = positions - positions.gather(1, previous.clamp(min=0))
    return steps.where(follows, 1), (index - previous).where(follows, 1)


def positions_in_documents(
    documents: Tensor, token_mask: Tensor | None = None, max_length: int | None = None
) -> tuple[Tensor, int]:
    """Return the number of tokens before each one in its run of equal ids, and a bound that these numbers stay below.

    Args:
        documents: (batch, n), the id of each token's document.
        token_mask: (batch, n), False for padding, which is not counted; None: no padding.
        max_length: the length of the longest run, used as the bound where reading the data would stall the device.
    """
    ones = (
        torch.ones_like(documents, dtype=torch.int64) if token_mask is None else token_mask.expand_as(documents).long()
    )
    counts = ones.cumsum(1)
    begins_run = functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    counts_before_run = (counts - ones).where(begins_run, 0).cummax(1).values
    positions = (counts - 1 - counts_before_run).clamp(min=0)
    if can_read(positions) and positions.numel():
        return positions, int(positions.max()) + 1
    return positions, max_length or positions.shape[1]


def count_visible_keys(site: Site, *, causal: bool, device: torch.device) -> Tensor:
    """Count the keys that each query may attend to, (1 or batch, n_q) int64, in O(n log n) and without all pairs.

    These are the keys of the query's document without padding; if ``causal``, only those at its position or before.
    Keys that a cache has dropped are counted, too.
    """
    queries, keys = _position_rows(site, device)
    if not causal and site.key_documents is None:
        mask = torch.ones_like(keys) if site.key_mask is None else site.key_mask
        return mask.count_nonzero(-1).unsqueeze(-1).expand(-1, queries.shape[-1]) + site.num_dropped_keys
    if not causal:
        # A causal query behind all keys sees all of them.
        site = replace(site, query_positions=torch.full(queries.shape, torch.inf, device=device))
    ones = torch.ones(1, 1, keys.shape[-1], dtype=torch.int64, device=device)
    return prefix_sums(site, ones)[0][:, 0] + site.num_dropped_keys


def prefix_sums(site: Site, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Sum numbers of the keys, without padding, in the order of documents and, within them, of positions.

    Args:
        site: the positions, mask and documents.
        numbers: (1 or batch, heads, n_k), one for each key.

    Returns:
        The sums over the keys up to each query, (1 or batch, heads, n_q), and over the keys up to each key and with it,
        (1 or batch, heads, n_k). Both start again in each document.
    """
    queries, keys = _position_rows(site, numbers.device)
    if site.key_mask is not None:
        numbers = numbers * site.key_mask[:, None].to(numbers.dtype)
    if site.key_documents is None and isinstance(site.key_positions, Positions):
        sums = functional.pad(numbers.cumsum(-1), (1, 0))
        first, stride, length = site.key_positions.start, site.key_positions.stride, site.key_positions.length
        # The number of keys at each query's position or before.
        num_keys = ((queries - first).div(stride, rounding_mode="floor") + 1).clamp(0, length).long()
        batch = _common_batch(sums, num_keys)
        index = num_keys.unsqueeze(1).expand(batch, sums.shape[1], -1)
        return sums.expand(batch, -1, -1).gather(-1, index), sums[..., 1:]
    query_documents, key_documents = site.query_documents, site.key_documents
    if query_documents is None or key_documents is None:
        query_documents, key_documents = torch.zeros_like(queries), torch.zeros_like(keys)
    # Keys and queries in one row; a key comes before a query at its position.
    dtype = torch.promote_types(keys.dtype, queries.dtype)
    batch = _common_batch(queries, keys, query_documents, key_documents, numbers)
    positions, documents = (
        torch.cat([rows.expand(batch, -1) for rows in pair], -1)
        for pair in ((keys.to(dtype), queries.to(dtype)), (key_documents, query_documents))
    )
    order = positions.argsort(dim=-1, stable=True)
    documents, document_order = documents.gather(-1, order).sort(dim=-1, stable=True)
    order = order.gather(-1, document_order).unsqueeze(1).expand(-1, numbers.shape[1], -1)
    row = functional.pad(numbers, (0, queries.shape[-1])).expand(batch, -1, -1).gather(-1, order)
    sums = row.cumsum(-1) if site.key_documents is None else _sums_in_documents(documents, row)
    sums = torch.zeros_like(sums).scatter(-1, order, sums)
    return sums[..., keys.shape[-1] :], sums[..., : keys.shape[-1]]


def _position_rows(site: Site, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions of queries and keys, (1 or batch, n_q) and (1 or batch, n_k)."""
    queries, keys = (position_values(rows, device) for rows in (site.query_positions, site.key_positions))
    return torch.atleast_2d(queries), torch.atleast_2d(keys)


def _sums_in_documents(documents: Tensor, row: Tensor) -> Tensor:
    """Return the running sums of a row (batch, heads, n), which start again in each document.

    ``documents`` (batch, n) are the ids, in ascending order.
    """
    first = torch.searchsorted(documents, documents).unsqueeze(1).expand_as(row)
    # In a sum over the full row, the numbers of a late document would lose digits. MPS has no float64.
    wide = row.double() if row.is_floating_point() and row.device.type != "mps" else row
    sums = functional.pad(wide.cumsum(-1), (1, 0))
    return (sums[..., 1:] - sums.gather(-1, first)).to(row.dtype)


def _common_batch(*tensors: Tensor) -> int:
    """Return the size to which the first axes of tensors broadcast; it may be 0."""
    return torch.broadcast_shapes(*((tensor.shape[0],) for tensor in tensors))[0]
