"""``identify``: which position method explains the scores of another program, and what that program does otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, shown
from ..kernels.call import make_call
from ..kernels.reference import attention_scores
from ..kernels.terms import Positions
from ..positions import Position, Site, name_of
from ..positions.base import check_value
from ..positions.rope import LAYOUTS, Rope

Scorer = Callable[[Tensor, Tensor], Any]
"""Computes scores (1, heads, n, n) or (heads, n, n) from query and key (1, heads, n, head_dim)."""

Parts = tuple[Tensor | None, Tensor | None]
"""Query . key and what position adds, each (heads, n, n) or None."""

TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda table: table,
    "taken for its transpose": lambda table: table.reshape(table.mT.shape).mT.contiguous(),
    "transposed and taken for itself": lambda table: table.mT.reshape(table.shape),
    "reversed": lambda table: table.flip(-1),
}
"""How a table of parameters can be read."""


@dataclass(frozen=True)
class Cell:
    """A score that is not the method's: its head, query and key, and both numbers."""

    head: int
    query: int
    key: int
    found: float
    expected: float


@dataclass(frozen=True)
class Reading:
    """One way to compute a method's scores; the default is the right one.

    Args:
        sign: -1 if offsets are query - key.
        shift: what is added to every offset, before the sign.
        layout: how RoPE pairs features; None for the method's own.
        table: how tables of parameters are read: "as it is", "taken for its transpose", "transposed and taken for
            itself" or "reversed" (columns begin at the last).
    """

    sign: int = 1
    shift: int = 0
    layout: str | None = None
    table: str = "as it is"

    def changes(self) -> list[str]:
        """Return the names of what is not right."""
        right = Reading()
        return [field.name for field in fields(self) if getattr(self, field.name) != getattr(right, field.name)]


@dataclass(frozen=True)
class Identified:
    """What explains scores.

    Args:
        method: the name of the method; None if nothing explains them.
        reading: how the scores were computed.
        content: the factor on query . key, relative to the method's; None where there is none.
        position: the factor on what position adds, relative to the method's; None where it adds nothing.
        cell: the first score that differs from the method as it should be computed; None if none does.
    """

    method: str | None
    reading: Reading
    content: float | None
    position: float | None
    cell: Cell | None

    @property
    def right(self) -> bool:
        """Whether the scores are the method's."""
        return self.method is not None and self.cell is None

    def __str__(self) -> str:
        if self.right:
            return f"these are the scores of {self.method}"
        where = ""
        if (cell := self.cell) is not None:
            where = f"head {cell.head}, query {cell.query}, key {cell.key}: {cell.found:.6g}, not {cell.expected:.6g}"
        if self.method is None:
            return f"no method explains these scores; the first that differs is at {where}"
        said = {
            "sign": "the sign of offsets is wrong",
            "shift": f"offsets are off by {self.reading.shift:+d}",
            "layout": f"features are paired as {self.reading.layout!r}",
            "table": f"a table is {self.reading.table}",
        }
        parts = [said[name] for name in self.reading.changes()]
        for name, factor in (("query . key", self.content), ("what position adds", self.position)):
            if factor is not None and _differs(factor):
                parts.append(f"{name} is multiplied by {factor:.6g}")
        return f"{self.method}, but {', and '.join(parts)} (at {where})"


def identify(
    scores: Any | Scorer,
    methods: Position | Mapping[str, Position],
    *,
    length: int = 12,
    layer: int = 0,
    tolerance: float = 1e-4,
) -> Identified:
    """Say which of several methods computes the same scores, and what is wrong if none does exactly.

    Compare a port of a model with a method that has the same parameters. The commonest errors of ports are tried, each
    and together: offsets of the wrong sign, offsets that are off by one or two, RoPE with another pairing, tables
    transposed or reversed, and a missing factor. The reading with the fewest errors wins. Scores are before softmax;
    those that are not finite are left out, so a causal mask does no harm.

    Args:
        scores: what position adds, (heads, n, n), as a tensor or an array of NumPy; or a function of query and key
            (1, heads, n, head_dim) that returns all scores before softmax. It is called once, with random numbers in
            float64.
        methods: a method with its parameters, or several by name.
        length: the number of tokens, if ``scores`` is a function.
        layer: the layer whose parameters count.
        tolerance: how far scores may be from a method's, relative to the largest.

    Raises:
        InputError: if a method needs query and key and ``scores`` are numbers, for scores of another shape, NaN or none
            that is not masked, or a layer that a method was not built for.
    """
    if isinstance(methods, Position):
        methods = {name_of(methods): methods}
    _check(methods, length, layer, tolerance)
    heads = {method.model.num_heads for method in methods.values()}
    widths = {method.model.head_dim for method in methods.values()}
    if len(heads) > 1 or len(widths) > 1:
        raise InputError("methods", f"expected the same heads in all, got {sorted(heads)} of width {sorted(widths)}")
    sample = _Sample.of(scores, methods, length)
    best = None
    for name, method in methods.items():
        for reading in _readings(method):
            parts = sample.parts(method, reading, layer)
            factors = None if parts is None else sample.fit(parts, tolerance)
            if factors is not None:
                errors = len(reading.changes()) + sum(factor is not None and _differs(factor) for factor in factors)
                if best is None or errors < best[0]:
                    best = errors, name, reading, factors
    if best is None:
        first = next(iter(methods.values()))
        return Identified(None, Reading(), None, None, sample.first_cell(first, layer, tolerance))
    _, name, reading, factors = best
    return Identified(name, reading, *factors, sample.first_cell(methods[name], layer, tolerance))


def _check(methods: Any, length: Any, layer: Any, tolerance: Any) -> None:
    """Raise an InputError for arguments of :func:`identify` of another kind or beyond their bounds."""
    if not isinstance(methods, Mapping):
        raise InputError("methods", f"expected a position method, or several by name, got {shown(methods)}")
    if not methods:
        raise InputError("methods", "expected at least one position method, got none")
    for name, method in methods.items():
        if not isinstance(method, Position):
            raise InputError("methods", f"expected position methods, got {shown(method)} as {name!r}")
    for name, value, kind, least in (("length", length, "int", 1), ("tolerance", tolerance, "float", 0)):
        check_value(name, value, kind)
        if value < least:
            raise InputError(name, f"expected at least {least}, got {value}")
    check_value("layer", layer, "int")
    for method in methods.values():
        method.check_layer(layer)


def _as_tensor(numbers: Any, expected: str) -> Tensor:
    """Return scores as a tensor (heads, n, n) or (1, heads, n, n) in float64, if they are real numbers."""
    if hasattr(numbers, "__array__") and not isinstance(numbers, Tensor):
        array = numbers.__array__()
        # A copy, since torch takes no array that is reversed.
        numbers = torch.as_tensor(array.copy()) if array.dtype.kind in "fiu" else array
    if not isinstance(numbers, Tensor):
        raise InputError("scores", f"expected {expected}, got {shown(numbers)}")
    if numbers.dtype == torch.bool or numbers.is_complex():
        raise InputError("scores", f"expected real numbers, got {numbers.dtype}")
    if numbers.dim() not in (3, 4) or not numbers.numel():
        raise InputError("scores", f"expected shape (heads, n, n), n of at least 1, got {tuple(numbers.shape)}")
    return numbers.detach().double().cpu()


@dataclass(frozen=True)
class _Sample:
    """Scores to explain, (heads, n, n) in float64, with the query and the key that they come from, if any."""

    found: Tensor
    query: Tensor
    key: Tensor
    with_content: bool

    @classmethod
    def of(cls, scores: Any | Scorer, methods: Mapping[str, Position], length: int) -> _Sample:
        model = next(iter(methods.values())).model
        for name, method in methods.items():
            if _reads_input(method):
                raise InputError("methods", f"{name} reads a layer's input, which scores do not tell")
        scorer = None if hasattr(scores, "__array__") or not callable(scores) else scores
        if scorer is None:
            found = _as_tensor(scores, "a tensor, an array or a function of query and key")
            for name, method in methods.items():
                if method.needs_content:
                    raise InputError("scores", f"{name} reads query and key; expected a function of them, got numbers")
            length = found.shape[-1]
        generator = torch.Generator().manual_seed(0)
        size = (2, 1, model.num_heads, length, model.head_dim)
        query, key = torch.randn(size, generator=generator, dtype=torch.float64)
        if scorer is not None:
            found = _as_tensor(scorer(query, key), "a function that returns a tensor or an array")
        found = found[0] if found.dim() == 4 and len(found) == 1 else found
        wanted = (model.num_heads, length, length)
        if tuple(found.shape) != wanted:
            raise InputError("scores", f"expected shape {wanted}, got {tuple(found.shape)}")
        if bool(found.isnan().any()):
            head, i, j = found.isnan().nonzero()[0].tolist()
            raise InputError("scores", f"expected numbers, got NaN at head {head}, query {i}, key {j}")
        sample = cls(found, query, key, scorer is not None)
        if not bool(sample.seen().any()):
            raise InputError("scores", "expected a score that is not masked, got none")
        return sample

    def seen(self) -> Tensor:
        """Where scores are not masked: masks add -inf, the least number of a dtype, or a round one down to -10,000."""
        return self.found.isfinite() & (self.found > -9_000)

    @torch.no_grad()
    def parts(self, method: Position, reading: Reading, layer: int) -> Parts | None:
        """Return query . key and what position adds, each (heads, n, n); None if the method cannot be read so."""
        method = _read(method, reading)
        at = torch.arange(self.found.shape[-1])
        # offset = key - query, so this changes every offset alike.
        queries, keys = reading.sign * at, reading.sign * (at + reading.shift)
        hidden = self.query.new_zeros(1, len(at), method.model.hidden_size)
        query, key = (self.query, self.key) if self.with_content else (0 * self.query, 0 * self.key)
        try:
            site = Site(queries, keys, layer)
            changed_query, changed_key, value, terms = method.apply_hooks(hidden, query, key, key, site)
            content, whole = (
                attention_scores(
                    make_call(changed_query, changed_key, value, each, query_positions=queries, key_positions=keys)
                )[0]
                for each in ((), terms)
            )
        except (ValueError, TypeError, IndexError):
            if not reading.changes():
                raise
            return None  # positions that the method does not have
        added = (whole - content)[0]
        return content[0] if self.with_content and method.content else None, added if bool(added.any()) else None

    def fit(self, parts: Parts, tolerance: float) -> tuple[float | None, float | None] | None:
        """Return the factors with which the parts add up to the scores; None if there are none."""
        seen = self.seen()
        there = [part[seen] for part in parts if part is not None]
        target = self.found[seen]
        if not there:
            return None if bool(target.any()) else (None, None)
        columns = torch.stack(there, 1)
        factors = torch.linalg.lstsq(columns, target[:, None]).solution[:, 0]
        largest = float(target.abs().max())
        if float((columns @ factors - target).abs().max()) > tolerance * largest or bool((factors.abs() < 1e-6).any()):
            return None
        numbers = iter(factors.tolist())
        content, added = (None if part is None else next(numbers) for part in parts)
        return content, added

    def first_cell(self, method: Position, layer: int, tolerance: float) -> Cell | None:
        """Return the first score that the method would not give."""
        parts = self.parts(method, Reading(), layer)
        assert parts is not None
        expected = sum((part for part in parts if part is not None), torch.zeros_like(self.found))
        seen = self.seen()
        wrong = ((self.found - expected).abs() > tolerance * expected.abs().max().clamp(min=1e-30)) & seen
        if not bool(wrong.any()):
            return None
        head, query, key = wrong.nonzero()[0].tolist()
        return Cell(head, query, key, float(self.found[head, query, key]), float(expected[head, query, key]))


@torch.no_grad()
def _reads_input(method: Position) -> bool:
    """Whether what a method adds depends on the hidden states."""
    at = Positions(0, 1, 2)
    size = (1, at.length, method.model.hidden_size)
    like = next(method.parameters(), torch.empty(0))
    terms = [method.terms(hidden, Site(at, at)) for hidden in (like.new_zeros(size), like.new_ones(size))]
    found = [[each for term in given for each in vars(term).values() if isinstance(each, Tensor)] for given in terms]
    return not all(map(torch.equal, *found))


def _readings(method: Position) -> Iterator[Reading]:
    """Yield the ways to read a method, the right one first."""
    layouts: list[str | None] = [None]
    for part in method.methods():
        if isinstance(part, Rope):
            layouts += [layout for layout in LAYOUTS if layout != part.layout]
    tables = list(TABLES) if any(parameter.dim() > 1 for parameter in method.parameters()) else ["as it is"]
    for table, layout, shift, sign in product(tables, layouts, (0, 1, -1, 2, -2), (1, -1)):
        yield Reading(sign, shift, layout, table)


def _read(method: Position, reading: Reading) -> Position:
    """Return a copy of a method in float64 that pairs features and reads its tables so."""
    method = copy.deepcopy(method).double().cpu().eval()
    for part in method.modules():
        if isinstance(part, Rope) and reading.layout is not None:
            part.layout = reading.layout
    for parameter in method.parameters():
        if parameter.dim() > 1:
            parameter.data = TABLES[reading.table](parameter.data)
    return method


def _differs(factor: float) -> bool:
    return abs(factor - 1) > 1e-3
