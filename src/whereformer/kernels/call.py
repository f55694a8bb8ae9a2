"""All checks of a call's input, and how its arguments become the fields of a ``Call``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar, get_args

import torch
from torch import Tensor

from .fields import TERMS, Call
from .merge import merge
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
    diagonal_of,
    offset_range,
    offset_step,
    right_aligned,
)
from .tracing import are_numbers, can_look, holds

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Integer

Function = TypeVar("Function", bound=Callable[..., Any])

Window: TypeAlias = int | tuple[int | None, int | None] | None
"""How far before and after its own position a query attends: one number for both sides, or one each; None: any."""

FARTHEST = 2**62
"""Positions are below this number, so offsets are below twice this number."""
MOST_SOFTCAP = 1e30
"""Soft caps beyond it, or below one divided by it, leave float32's range when they are multiplied."""


class SequenceOptions(TypedDict, total=False):
    """The keyword arguments of :func:`whereformer.attention` that :func:`whereformer.attention_varlen` takes too."""

    causal: bool
    window: Window
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout_p: float
    query_positions: PositionsLike | None
    key_positions: PositionsLike | None


class CallOptions(SequenceOptions, total=False):
    """The keyword arguments of :func:`whereformer.attention` except ``backend`` and ``return_lse``: they define what is
    computed."""

    key_mask: Tensor | None
    query_documents: Tensor | None
    key_documents: Tensor | None


_NO_TERMS: dict[str, Any] = {**dict.fromkeys(TERMS), "first": [0, 0, 0, 0]}


def make_call(
    query: Float[Tensor, "batch heads n_q head_dim"] | None,
    key: Float[Tensor, "batch key_heads n_k head_dim"] | None,
    value: Float[Tensor, "batch key_heads n_k value_dim"],
    terms: Sequence[Term] = (),
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

    The call has neither sinks, which are added to its result, nor the seed of dropout. It wants ``LogSums`` if there
    are sinks.

    Raises:
        TypeError: for a wrong type or dtype; the message names the argument.
        ValueError: for a wrong shape or value; the message names the argument.
    """
    check_flag("return_lse", return_lse)
    batch, heads, n_k, value_dim = check_heads_tensor("value", value).shape
    if (query is None) != (key is None):
        raise ValueError("query and key: give both, or neither for attention without content scores")
    terms = check_terms(terms)
    if query is not None and key is not None:
        query, key, value = _check_content(query, key, value)
        _, heads, n_q, head_dim = query.shape
    else:
        _check_no_content(terms, scale, softcap)
        n_q, head_dim = _query_length(terms, query_positions, n_k), value_dim
    for term in terms:
        term.check(batch, heads, n_q, n_k, value_dim if isinstance(term, OffsetValues) else head_dim)
        for field, tensor in vars(term).items():
            if isinstance(tensor, Tensor):
                check_device(f"{type(term).__name__}.{field}", tensor, value)
    if key_mask is not None:
        kind = "a bool tensor with True = may be attended"
        _check_numbers("key_mask", key_mask, value, "n_k", n_k, kind, lambda mask: mask.dtype == torch.bool)
    check_flag("causal", causal)
    sides = _check_window(window)
    if softcap is not None:
        softcap = _check_softcap(softcap)
    if not 0.0 <= _as_number("dropout_p", dropout_p, " in [0, 1)") < 1.0:
        raise ValueError(f"dropout_p: expected a number in [0, 1), got {dropout_p}")
    queries, keys = right_aligned(n_q, n_k)
    if query_positions is not None:
        queries = _check_positions("query_positions", query_positions, batch, n_q, terms)
    if key_positions is not None:
        keys = _check_positions("key_positions", key_positions, batch, n_k, terms)
    query_documents, key_documents = _check_documents(query_documents, key_documents, value, n_q)
    if sinks is not None:
        _check_sinks(sinks, value, (batch, heads, n_q))
    scale = _check_scale(scale, head_dim, value.dtype)
    low, high = _offset_limits(causal, sides, queries, keys)
    merged = _NO_TERMS
    if len(terms) > 0:
        terms, queries, keys, step = _without_steps(terms, queries, keys)
        low, high = None if low is None else -(-low // step), None if high is None else high // step
        with without_autocast(value.device):
            merged = merge(terms, query, key, value, scale, allowed_span(queries, keys, low, high))
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
        affine=[n for at in (queries, keys) for n in ((at.start, at.stride) if isinstance(at, Positions) else (0, 1))],
        min_offset=low,
        max_offset=high,
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        wants_lse=return_lse or sinks is not None,
    )


def _check_no_content(terms: tuple[Term, ...], scale: Any, softcap: Any) -> None:
    """Raise for what a call without a query cannot have."""
    for term in terms:
        if isinstance(term, OffsetKeys | OffsetQueries) and term.factors is None:
            met = "query" if isinstance(term, OffsetKeys) else "key"
            raise ValueError(f"{type(term).__name__}: needs a {met}, got {met}=None")
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None:
            raise ValueError(f"{name}: needs a query, got query=None")


def _check_content(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value in one dtype."""
    batch, heads, n_k, _ = value.shape
    check_heads_tensor("query", query)
    check_heads_tensor("key", key)
    query, key, value = _check_kind(query, key, value)
    query_batch, query_heads, _, head_dim = query.shape
    if query_batch != batch or not _can_share(query_heads, heads):
        raise ValueError(
            f"query: expected (batch {batch}, heads {heads} or a multiple, n_q, head_dim) as in value, "
            f"got {tuple(query.shape)}"
        )
    if key.shape != (batch, heads, n_k, head_dim):
        raise ValueError(
            f"key: expected (batch {batch}, heads {heads}, n_k {n_k}, head_dim {head_dim}), got {tuple(key.shape)}"
        )
    return query, key, value


def _can_share(query_heads: int, heads: int) -> bool:
    """Whether so many query heads can share so many heads of keys and values."""
    # Without a value head, any number would be a multiple of theirs.
    return query_heads == heads or (heads != 0 and query_heads != 0 and query_heads % heads == 0)


def check_flag(name: str, flag: Any) -> None:
    """Raise unless a flag is True or False."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name}: expected True or False, got {flag!r}")


def shows_options(shown: Callable[..., Any], without: Collection[str] = ()) -> Callable[[Function], Function]:
    """Let a function show, in place of ``**options``, the keyword arguments of another that it passes on."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        more = [
            each
            for each in inspect.signature(shown).parameters.values()
            if each.kind is inspect.Parameter.KEYWORD_ONLY and each.name not in {*signature.parameters, *without}
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return function

    return decorate


def _as_number(name: str, number: Any, which: str = "", instead: str = "") -> Any:
    """Convert a number to float, one beyond all floats to infinity; symbols of a compiled program stay symbols."""
    kinds: tuple[Any, ...] = (float, Real, torch.SymFloat, torch.SymInt)
    if isinstance(number, bool) or not isinstance(number, kinds):
        raise TypeError(f"{name}: expected a number{which}, got {type(number).__name__}{instead}")
    if isinstance(number, torch.SymFloat | torch.SymInt):
        return number
    if torch.compiler.is_compiling():
        return float(number)
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _check_window(window: Any) -> tuple[int | None, int | None]:
    """Return how far a query attends before and after its position."""
    if window is None:
        return None, None
    sides = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"window: expected one number, or two for the sides (before, after), got {window!r}")
    numbers = tuple(as_int(side) for side in sides)
    for side, number in zip(sides, numbers, strict=True):
        if side is not None and (number is None or number < 0):
            kind = ValueError if number is not None else TypeError
            raise kind(
                "window: expected a whole number of at least 0, or two (before, after), where None is no limit, "
                f"got {window!r}"
            )
    # Larger numbers, which an int64 may not hold, forbid no offset.
    before, after = (None if isinstance(number, int) and number >= 2 * FARTHEST - 1 else number for number in numbers)
    return before, after


def _check_softcap(softcap: Any) -> Any:
    number = _as_number("softcap", softcap)
    if not (torch.compiler.is_compiling() or 1 / MOST_SOFTCAP <= number <= MOST_SOFTCAP):
        least, most = 1 / MOST_SOFTCAP, MOST_SOFTCAP
        raise ValueError(f"softcap: expected a number from {least:g} to {most:g}, or None for no cap, got {number}")
    return number


def _check_sinks(sinks: Any, value: Tensor, rows: tuple[int, int, int]) -> None:
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        got = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"sinks: expected a floating-point tensor, got {got}")
    batch, heads, n_q = rows
    # "shape not in (...)" would not compile with symbolic sizes.
    if sinks.shape != (heads,) and sinks.shape != rows:
        raise ValueError(
            f"sinks: expected shape (heads {heads},) or (batch {batch}, heads {heads}, n_q {n_q}), "
            f"got {tuple(sinks.shape)}"
        )
    check_device("sinks", sinks, value)


def _offset_limits(
    causal: bool, window: tuple[int | None, int | None], queries: PositionsLike, keys: PositionsLike
) -> tuple[int | None, int | None]:
    """Return the smallest and the largest offset that causality and the window allow; None where that is any that
    occurs, as far as one can tell without reading explicit positions."""
    before, after = window
    if causal:
        diagonal, n_k = diagonal_of(queries, keys), keys.length if isinstance(keys, Positions) else keys.shape[-1]
        after = 0 if diagonal is None or not holds(diagonal >= n_k - 1) else None
    span = None if before is None and after is None else offset_range(queries, keys)
    if span is not None and are_numbers(*span):
        before = None if before is None or before >= -span[0] else before
        after = None if after is None or after >= span[1] else after
    return None if before is None else -before, after


def _without_steps(
    terms: tuple[Term, ...], queries: PositionsLike, keys: PositionsLike
) -> tuple[tuple[Term, ...], PositionsLike, PositionsLike, int]:
    """Return terms and positions in units of the tables' step, so that backends need only tables with step 1; and the
    step."""
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
        raise ValueError(f"{name}.step: offsets between these positions and first are no multiples of {step}")
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
    strides = [at.stride // step if at.length > 1 else 1 for at in (queries, keys)]
    start = (keys.start - queries.start) // step
    return (tuple(rescaled), Positions(0, strides[0], queries.length), Positions(start, strides[1], keys.length), step)


def check_heads_tensor(name: str, tensor: Tensor) -> Tensor:
    """Return a query, key or value unchanged if it is one."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise TypeError(
            f"{name}: expected a dense tensor, got a nested one; attention_varlen takes sequences of different lengths"
        )
    if tensor.dim() != 4:
        raise ValueError(f"{name}: expected (batch, heads, length, head_dim), got shape {tuple(tensor.shape)}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {tensor.dtype}")
    return tensor


def _check_kind(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three in one dtype, cast as autocast does, after checking that they are on one device."""
    if not query.dtype == key.dtype == value.dtype:
        query, key, value = as_autocast(query, key, value)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name}: expected the query's dtype {query.dtype}, got {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name}: expected the query's device {query.device}, got {tensor.device}")
    return query, key, value


def _check_scale(scale: Any, head_dim: int, dtype: torch.dtype) -> float:
    if scale is None:
        return head_dim**-0.5 if head_dim else 1.0
    number: float = _as_number("scale", scale, instead="; multiply the query by a tensor")
    kind = torch.promote_types(dtype, torch.float32)
    if not (torch.compiler.is_compiling() or abs(number) <= torch.finfo(kind).max):
        raise ValueError(f"scale: expected a finite number in {str(kind).removeprefix('torch.')}, got {number}")
    return number


def check_device(name: str, tensor: Tensor, value: Tensor) -> None:
    """Raise unless a tensor is on the value's device."""
    if tensor.device != value.device:
        raise ValueError(f"{name}: expected the value's device {value.device}, got {tensor.device}")


def check_terms(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Return terms as a tuple if they are terms."""
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


def _query_length(terms: tuple[Term, ...], query_positions: PositionsLike | None, n_k: int) -> int:
    """Return n_q of a call without a query: from the positions, else from a term that has rows, else n_k.

    Invalid positions and terms are ignored here; their own checks report them.
    """
    if isinstance(query_positions, Positions):
        return query_positions.length
    if isinstance(query_positions, Tensor) and query_positions.dim():
        return query_positions.shape[-1]
    for term in terms:
        for field, axes in term.axes.items():
            rows, names = getattr(term, field), axes.split()
            if "n_q" in names and isinstance(rows, Tensor) and rows.dim() == len(names):
                return rows.shape[names.index("n_q")]
    return n_k


def _check_positions(
    name: str, positions: PositionsLike, batch: int, length: int, terms: tuple[Term, ...]
) -> PositionsLike:
    """Check the positions and return them in a dtype that torch can compute with."""
    if isinstance(positions, Positions):
        if positions.length != length:
            raise ValueError(f"{name}: expected length {length}, got {positions}")
        return positions
    if not isinstance(positions, Tensor):
        raise TypeError(f"{name}: expected Positions or a tensor, got {type(positions).__name__}")
    shape = positions.shape
    # Comparing shapes of different dimensions would compare symbolic sizes that have nothing to do with one another.
    rows = shape[0] == batch or shape[0] == 1 if positions.dim() == 2 else positions.dim() == 1
    if not rows or shape[-1] != length:
        raise ValueError(f"{name}: expected shape ({length},) or ({batch}, {length}), got {tuple(shape)}")
    if positions.dtype == torch.bool or positions.is_complex():
        raise TypeError(f"{name}: expected numbers, got {positions.dtype}")
    if not positions.is_floating_point():
        return _signed(positions)
    if any(isinstance(term, TABLES) for term in terms):
        raise TypeError(f"{name}: offset tables need whole positions, got {positions.dtype}")
    if can_look(positions) and not bool(positions.isfinite().all()):
        raise ValueError(f"{name}: expected finite numbers, got infinite ones or NaN")
    return positions


def _check_numbers(
    name: str, numbers: Any, value: Tensor, axis: str, length: int, kind: str, right: Callable[[Tensor], bool]
) -> None:
    """Raise unless a tensor has one number of the right kind for each query or key of each item."""
    batch = value.shape[0]
    if not isinstance(numbers, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(numbers).__name__}")
    if numbers.shape != (batch, length):
        raise ValueError(f"{name}: expected shape (batch {batch}, {axis} {length}), got {tuple(numbers.shape)}")
    if not right(numbers):
        raise TypeError(f"{name}: expected {kind}, got {numbers.dtype}")
    check_device(name, numbers, value)


def _check_documents(
    queries: Tensor | None, keys: Tensor | None, value: Tensor, n_q: int
) -> tuple[Tensor | None, Tensor | None]:
    """Check the ids and return them in a dtype that torch can compute with."""
    if (queries is None) != (keys is None):
        raise ValueError("query_documents and key_documents: give both or neither")
    if queries is None or keys is None:
        return None, None

    def whole(ids: Tensor) -> bool:
        return not (ids.is_floating_point() or ids.is_complex())

    _check_numbers("query_documents", queries, value, "n_q", n_q, "whole numbers", whole)
    _check_numbers("key_documents", keys, value, "n_k", value.shape[2], "whole numbers", whole)
    return _signed(queries), _signed(keys)


def _signed(numbers: Tensor) -> Tensor:
    """Return whole numbers in a dtype that torch can compute with, which excludes the wider unsigned ones."""
    return numbers.to(torch.int64) if numbers.dtype in (torch.uint16, torch.uint32, torch.uint64) else numbers
