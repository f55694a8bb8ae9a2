"""``make_call``: checks all arguments of attention, and makes a ``Call`` of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar, get_args

import torch
from torch import Tensor

from .call import TERMS, Call
from .merge_terms import merge_terms
from .plan_cache import StepRecorder
from .precision import as_autocast, without_autocast
from .terms import (
    TABLES,
    OffsetKeys,
    OffsetQueries,
    OffsetValues,
    Positions,
    PositionsLike,
    Term,
    allowed_span,
    as_int,
    causal_diagonal,
    default_positions,
    offset_range,
    offset_step,
)
from .tracing import are_static, can_read, is_known_true

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Integer

Function = TypeVar("Function", bound=Callable[..., object])

Window: TypeAlias = int | tuple[int | None, int | None] | None
"""How far before and after its position a query attends: one number, or (before, after); None is any distance."""

MAX_POSITION = 2**62
"""Positions are below this number, so offsets are below twice this number."""

MAX_DROPOUT = 0.999999
MAX_SOFTCAP = 1e30
"""The largest soft cap; one divided by it is the smallest. Beyond these, products with it leave float32's range."""


class PositionOptions(TypedDict, total=False):
    """The keyword arguments of :func:`whereformer.attention` about positions and distances."""

    causal: bool
    window: Window
    scale: float | None
    query_positions: PositionsLike | None
    key_positions: PositionsLike | None


class SiteOptions(PositionOptions, total=False):
    """The options that a :class:`~whereformer.Site` has: those, and the ones about padding and packed rows."""

    key_mask: Tensor | None
    query_documents: Tensor | None
    key_documents: Tensor | None


class SoftmaxOptions(TypedDict, total=False):
    """The keyword arguments of :func:`whereformer.attention` about scores and weights."""

    softcap: float | None
    sinks: Tensor | None
    dropout_p: float


class SequenceOptions(PositionOptions, SoftmaxOptions):
    """The options of :func:`whereformer.attention_varlen`."""


class CallOptions(SiteOptions, SoftmaxOptions):
    """All keyword arguments of :func:`whereformer.attention` except ``backend`` and ``return_lse``."""


_NO_TERMS: dict[str, Any] = {**dict.fromkeys(TERMS), "first": [0] * len(TABLES)}


def make_call(
    query: Float[Tensor, "batch heads n_q head_dim"] | None,
    key: Float[Tensor, "batch key_heads n_k head_dim"] | None,
    value: Float[Tensor, "batch key_heads n_k value_dim"],
    terms: Sequence[Term] = (),
    recorder: StepRecorder | None = None,
    *,
    return_lse: bool = False,
    key_mask: Bool[Tensor, "batch n_k"] | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "heads"] | Float[Tensor, "batch heads n_q"] | None = None,
    dropout_p: float = 0.0,
    query_positions: PositionsLike | None = None,
    key_positions: PositionsLike | None = None,
    query_documents: Integer[Tensor, "batch n_q"] | None = None,
    key_documents: Integer[Tensor, "batch n_k"] | None = None,
) -> Call:
    """Check all arguments of :func:`whereformer.attention` once, so that no backend has to, and return the call.

    The call has neither sinks, which are added to its result, nor the seed of dropout. With sinks it needs ``LogSums``.
    The ``recorder`` records how tensors are cast and merged, for later calls with the same signature.

    Raises:
        TypeError: for a wrong type or dtype; the message names the argument.
        ValueError: for a wrong shape or value; the message names the argument.
    """
    for name, flag in (("return_lse", return_lse), ("causal", causal)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected True or False, got {flag!r}")
    check_tensor("value", value, FLOATING, dict.fromkeys(("batch", "heads", "n_k", "head_dim")))
    batch, heads, n_k, value_dim = value.shape
    if (query is None) != (key is None):
        raise ValueError("query and key: give both, or neither for attention without content scores")
    terms = check_terms(terms)
    if query is not None and key is not None:
        query, key, value = _check_content(query, key, value, recorder)
        _, heads, n_q, head_dim = query.shape
    else:
        n_q, head_dim = _length_without_content(terms, scale, softcap, query_positions, n_k), value_dim
    device = value.device
    for term in terms:
        check_term(term, batch, heads, n_q, n_k, value_dim if isinstance(term, OffsetValues) else head_dim, device)
    if key_mask is not None:
        check_tensor("key_mask", key_mask, BOOL, {"batch": batch, "n_k": n_k}, device=device)
    sides = _check_window(window)
    if softcap is not None:
        softcap = _check_number("softcap", softcap, 1 / MAX_SOFTCAP, MAX_SOFTCAP)
    dropout_p = _check_number("dropout_p", dropout_p, 0.0, MAX_DROPOUT)
    default_query, default_key = default_positions(n_q, n_k)
    with recorder or nullcontext():  # checks that read numbers keep the call out of the cache
        queries = _check_positions("query_positions", query_positions, default_query, batch, terms)
        keys = _check_positions("key_positions", key_positions, default_key, batch, terms)
    if (query_documents is None) != (key_documents is None):
        raise ValueError("query_documents and key_documents: give both or neither")
    if query_documents is not None:
        check_tensor("query_documents", query_documents, INTEGER, {"batch": batch, "n_q": n_q}, device=device)
        check_tensor("key_documents", key_documents, INTEGER, {"batch": batch, "n_k": n_k}, device=device)
    if sinks is not None:
        query_sizes = {"batch": batch, "heads": heads, "n_q": n_q}
        check_tensor("sinks", sinks, FLOATING, {"heads": heads}, query_sizes, device=device)
    max_scale = torch.finfo(torch.promote_types(value.dtype, torch.float32)).max
    default_scale = head_dim**-0.5 if head_dim else 1.0
    scale = default_scale if scale is None else _check_number("scale", scale, -max_scale, max_scale)
    low, high = _offset_limits(causal, sides, queries, keys)
    merged = _NO_TERMS
    if len(terms) > 0:
        with without_autocast(value.device), recorder or nullcontext():
            terms, queries, keys, step = _without_steps(terms, queries, keys)
            low, high = None if low is None else -(-low // step), None if high is None else high // step
            merged = merge_terms(terms, query, key, value, scale, allowed_span(queries, keys, low, high))
    return Call(
        query=query,
        key=key,
        value=value,
        **merged,
        key_mask=key_mask,
        query_positions=None if isinstance(queries, Positions) else queries,
        key_positions=None if isinstance(keys, Positions) else keys,
        query_documents=query_documents,
        key_documents=key_documents,
        seed=None,
        n_q=n_q,
        affine=[*_start_and_stride(queries), *_start_and_stride(keys)],
        min_offset=low,
        max_offset=high,
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        wants_lse=return_lse or sinks is not None,
    )


def _start_and_stride(positions: PositionsLike) -> tuple[int, int]:
    return (positions.start, positions.stride) if isinstance(positions, Positions) else (0, 1)


def _length_without_content(terms: tuple[Term, ...], scale: Any, softcap: Any, positions: Any, n_k: int) -> int:
    """Check that no argument needs a query; return n_q, the number of query positions or else of keys."""
    for term in terms:
        for kind, rows in ((OffsetKeys, "query"), (OffsetQueries, "key")):
            if isinstance(term, kind) and getattr(term, f"{rows}_factors") is None:
                raise ValueError(f"{kind.__name__}: needs a {rows}, got {rows}=None")
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None:
            raise ValueError(f"{name}: needs a query, got query=None")
    if isinstance(positions, Tensor) and positions.dim():
        return positions.shape[-1]
    return positions.length if isinstance(positions, Positions) else n_k


def _check_content(
    query: Tensor, key: Tensor, value: Tensor, recorder: StepRecorder | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value in one dtype."""
    batch, heads, n_k, _ = value.shape
    check_tensor("query", query, FLOATING, {"batch": batch, "heads": None, "n_q": None, "head_dim": None})
    sizes: dict[str, Size] = {"batch": batch, "heads": heads, "n_k": n_k, "head_dim": query.shape[3]}
    check_tensor("key", key, FLOATING, sizes, device=value.device)
    if not query.dtype == key.dtype == value.dtype:
        with recorder or nullcontext():
            query, key, value = as_autocast(query, key, value)
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dtype != value.dtype:
            raise TypeError(f"{name}: expected the value's dtype {value.dtype}, got {tensor.dtype}")
        if tensor.device != value.device:
            raise ValueError(f"{name}: expected the value's device {value.device}, got {tensor.device}")
    if query.shape[1] != heads and (heads == 0 or query.shape[1] == 0 or query.shape[1] % heads):
        raise ValueError(f"query: expected the value's {heads} heads or a multiple, got {query.shape[1]}")
    return query, key, value


def show_options(options: Any) -> Callable[[Function], Function]:
    """Let a function's signature show, in place of ``**options``, the options of a TypedDict as in ``make_call``."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        declared = [value for value in signature.parameters.values() if value.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = inspect.signature(make_call).parameters
        shown = [value for name, value in parameters.items() if name in options.__optional_keys__]
        function.__signature__ = signature.replace(parameters=[*declared, *shown])  # type: ignore[attr-defined]
        return function

    return decorate


def _check_number(name: str, number: Any, low: float, high: float) -> Any:
    """Return a number from ``low`` to ``high`` as a float; symbols of a compiled program stay symbols."""
    types: tuple[Any, ...] = (float, Real, torch.SymFloat, torch.SymInt)
    if isinstance(number, bool) or not isinstance(number, types):
        raise TypeError(f"{name}: expected a number, got {type(number).__name__}")
    if not (torch.compiler.is_compiling() or low <= number <= high):
        raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, got {number}")
    return number if isinstance(number, torch.SymFloat | torch.SymInt) else float(number)


def _check_window(window: object) -> tuple[int | None, int | None]:
    """Return how far a query attends before and after its position."""
    if window is None:
        return None, None
    sides = window if isinstance(window, tuple | list) else (window, window)
    numbers = [as_int(side) for side in sides]
    fit = [side is None or (number is not None and number >= 0) for side, number in zip(sides, numbers, strict=True)]
    if len(sides) != 2 or not all(fit):
        raise ValueError(
            f"window: expected an integer of at least 0, or two (before, after), where None is no limit, got {window!r}"
        )
    # Larger numbers, which an int64 may not hold, forbid no offset.
    limit = 2 * MAX_POSITION - 1
    before, after = (None if isinstance(number, int) and number >= limit else number for number in numbers)
    return before, after


def _offset_limits(
    causal: bool, window: tuple[int | None, int | None], queries: PositionsLike, keys: PositionsLike
) -> tuple[int | None, int | None]:
    """Return the smallest and the largest offset that causality and the window allow. A limit is None if no offset
    exceeds it, as far as this follows without reading explicit positions."""
    before, after = window
    if causal:
        diagonal, n_k = causal_diagonal(queries, keys), keys.length if isinstance(keys, Positions) else keys.shape[-1]
        after = 0 if diagonal is None or not is_known_true(diagonal >= n_k - 1) else None
    span = None if before is None and after is None else offset_range(queries, keys)
    if span is not None and are_static(*span):
        before = None if before is None or before >= -span[0] else before
        after = None if after is None or after >= span[1] else after
    return None if before is None else -before, after


def _without_steps(
    terms: tuple[Term, ...], queries: PositionsLike, keys: PositionsLike
) -> tuple[tuple[Term, ...], PositionsLike, PositionsLike, int]:
    """Return terms, and positions of queries and keys, in units of the tables' step, so that backends need only tables
    with step 1; and the step."""
    tables = [term for term in terms if isinstance(term, TABLES)]
    steps = {term.step for term in tables if term.step != 1}
    if not steps:
        return terms, queries, keys, 1
    stepped = next(term for term in tables if term.step != 1)
    name, step = type(stepped).__name__, stepped.step
    if len(steps) > 1:
        raise ValueError(f"{name}.step: expected the same step in all tables, got {sorted(steps)}")
    if not (isinstance(queries, Positions) and isinstance(keys, Positions)):
        raise ValueError(f"{name}.step: a step of {step} needs affine positions, got explicit ones")
    between = offset_step(queries, keys)
    if between % step or any(term.first % step for term in tables if term.step == step):
        raise ValueError(f"{name}.step: expected first and all offsets between positions to be multiples of {step}")
    low, high = offset_range(queries, keys) or (0, 0)
    rescaled: list[Term] = []
    for term in terms:
        if isinstance(term, TABLES):
            table, first = term.table, term.first
            if term.step == 1:
                rows = torch.arange(low, high + 1, step, device=table.device) - first
                table, first = table.index_select(1, rows.clamp(0, table.shape[1] - 1)), low
            term = replace(term, table=table, first=first // step, step=1)
        rescaled.append(term)
    strides = [positions.stride // step if positions.length > 1 else 1 for positions in (queries, keys)]
    start = (keys.start - queries.start) // step
    return (tuple(rescaled), Positions(0, strides[0], queries.length), Positions(start, strides[1], keys.length), step)


Size: TypeAlias = int | tuple[int, int] | None
"""The size of an axis: one number, either of two, or any."""

FLOATING, NUMBERS, INTEGER = "a floating-point tensor", "a tensor of numbers", "an integer tensor"
BOOL = "a bool tensor with True = may be attended"

_INTEGER_DTYPES = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8
"""The integer dtypes that torch computes with."""

_IS_KIND: dict[str, Callable[[Tensor], bool]] = {
    FLOATING: torch.is_floating_point,
    NUMBERS: lambda tensor: tensor.is_floating_point() or tensor.dtype in _INTEGER_DTYPES,
    INTEGER: lambda tensor: tensor.dtype in _INTEGER_DTYPES,
    BOOL: lambda tensor: tensor.dtype == torch.bool,
}


def check_tensor(
    name: str, tensor: object, kind: str, *shapes: Mapping[str, Size], device: torch.device | None = None
) -> None:
    """Raise unless a tensor is of the kind, has one of the shapes, and is on the device of the call's value.

    Args:
        kind: FLOATING, NUMBERS, INTEGER or BOOL.
        shapes: axes with their sizes.
        device: the expected device. If None, any.
    """
    if not isinstance(tensor, Tensor) or not _IS_KIND[kind](tensor):
        actual = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: expected {kind}, got {actual}")
    if tensor.is_nested:
        raise TypeError(
            f"{name}: expected a dense tensor, got a nested one; use attention_varlen for sequences of unequal lengths"
        )
    if not any(_fits(tensor, tuple(shape.values())) for shape in shapes):
        expected = " or ".join(
            f"({', '.join(axis if size is None else f'{axis} {_format_size(size)}' for axis, size in shape.items())})"
            for shape in shapes
        )
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected the value's device {device}, got {tensor.device}")


def _fits(tensor: Tensor, sizes: tuple[Size, ...]) -> bool:
    # ``size in expected``, and a comparison of whole shapes, would not compile with symbolic sizes.
    return tensor.dim() == len(sizes) and all(
        expected is None
        or (size == expected[0] or size == expected[1] if isinstance(expected, tuple) else size == expected)
        for size, expected in zip(tensor.shape, sizes, strict=True)
    )


def _format_size(size: Size) -> str:
    return " or ".join(map(str, dict.fromkeys(size))) if isinstance(size, tuple) else str(size)


def check_term(term: Term, batch: int, heads: int, n_q: int, n_k: int, head_dim: int, device: torch.device) -> None:
    """Raise a TypeError or ValueError unless a term fits a call of these sizes on the device."""
    sizes: dict[str, tuple[str, Size]] = {
        "items": ("batch", (1, batch)),
        "heads": ("heads", heads),
        "any_heads": ("heads", (1, heads)),
        "n_q": ("n_q", n_q),
        "n_k": ("n_k", n_k),
        "width": ("head_dim", head_dim),
        "T": ("T", None),
        "r": ("r", None),
    }
    for field, axes in term.axes.items():
        tensor, names, name = getattr(term, field), axes.split(), f"{type(term).__name__}.{field}"
        if tensor is None and isinstance(term, TABLES) and field != "table":
            continue  # the table meets queries or keys instead of factors
        check_tensor(name, tensor, FLOATING, dict([sizes[axis] for axis in names]), device=device)
        if any(size == 0 for axis, size in zip(names, tensor.shape, strict=True) if axis in ("T", "r")):
            raise ValueError(f"{name}: needs at least one number, got shape {tuple(tensor.shape)}")
        if "r" in names:
            # The term's other tensors have the same rank.
            sizes["r"] = sizes["width"] = "r", tensor.shape[names.index("r")]


def check_terms(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Return terms as a tuple; raise a TypeError unless they are terms."""
    if isinstance(terms, tuple) and len(terms) == 0:
        return ()
    if isinstance(terms, Term):
        raise TypeError(f"terms: expected a sequence of terms, got a single {type(terms).__name__}; write (term,)")
    if not isinstance(terms, Iterable) or isinstance(terms, Tensor):
        raise TypeError(f"terms: expected a sequence of terms, got {type(terms).__name__}")
    terms = tuple(terms)
    for term in terms:
        if not isinstance(term, Term):
            known = ", ".join(kind.__name__ for kind in get_args(Term))
            raise TypeError(f"terms: expected {known}, got {type(term).__name__}")
    return terms


def _check_positions(
    name: str, positions: PositionsLike | None, default: Positions, batch: int, terms: tuple[Term, ...]
) -> PositionsLike:
    """Check positions and return them detached, or the default if they are None.

    They only decide which pairs may attend, and at which offset a table is read, so they have no gradient.
    """
    if positions is None:
        return default
    if isinstance(positions, Positions):
        if positions.length != default.length:
            raise ValueError(f"{name}: expected length {default.length}, got {positions}")
        return positions
    check_tensor(name, positions, NUMBERS, {"n": default.length}, {"batch": (1, batch), "n": default.length})
    if not positions.is_floating_point():
        return positions
    if any(isinstance(term, TABLES) for term in terms):
        raise TypeError(f"{name}: offset tables need integer positions, got {positions.dtype}")
    if can_read(positions) and not bool(positions.isfinite().all()):
        raise ValueError(f"{name}: expected finite numbers, got infinite ones or NaN")
    # Always: whether positions require a gradient is not in a call's signature, so a cached call must not depend on it.
    return positions.detach()
