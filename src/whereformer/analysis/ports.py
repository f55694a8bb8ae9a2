"""Identify the position method that other code computes, and how the code differs from it.

Offsets of the wrong sign or off by one, another pairing in RoPE and transposed tables raise no error; they only make a
model worse. :func:`identify` gives random queries and keys to the code and to methods with the same parameters. It
reads each method in all of these wrong ways, and returns the reading that gives the code's scores with the fewest
differences.
"""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, short_repr
from ..kernels import Term, attention, attention_weights
from ..positions.base import PositionMethod
from ..positions.rope import LAYOUTS, Rope
from ..positions.site import Site

TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda table: table,
    "used as its transpose": lambda table: table.reshape(table.mT.shape).mT.contiguous(),
    "transposed, but read as if it were not": lambda table: table.mT.reshape(table.shape),
    "reversed": lambda table: table.flip(-1),
}
"""The ways to read a table of parameters; the first is right."""
TOLERANCE = 1e-4
"""The largest difference of scores that are the same, relative to the largest score."""
MIN_SCORE = -9_000
"""Masks add less than this to scores."""


@torch.no_grad()
def identify(code: Callable[..., Tensor], methods: Mapping[str, PositionMethod], *, returns_weights: bool) -> str:
    """Say in a sentence which method computes the same as some code, and how the code differs from it.

    Args:
        code: a function of query and key, each (1, heads, n, head_dim) in float64, that returns scores before softmax
            (1, heads, n, n). Scores that a mask sets to -10,000 or less are left out.
        methods: methods by name, with the code's parameters and number of heads.
        returns_weights: ``code`` is a function of query, key and value that returns softmax attention's output. n is
            then head_dim, and the values are the unit vectors, so the output is the weights.

    Raises:
        InputError: if ``code`` returns anything else.
    """
    model = next(iter(methods.values())).model
    length = model.head_dim if returns_weights else 12
    size = (2, 1, model.num_heads, length, model.head_dim)
    query, key = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit_vectors = torch.eye(length, dtype=query.dtype).expand(1, model.num_heads, -1, -1)
    try:
        result = code(query, key, unit_vectors) if returns_weights else code(query, key)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}, line {frame.lineno}"
        raise InputError("function", f"it raised {type(error).__name__}: {error} ({where})") from error
    expected = (1, model.num_heads, length, length)
    if not isinstance(result, Tensor) or result.shape != expected:
        value = tuple(result.shape) if isinstance(result, Tensor) else short_repr(result)
        raise InputError("function", f"expected it to return a tensor of shape {expected}, got {value}")
    scores = result[0].double().log() if returns_weights else result[0].double()
    visible = scores > MIN_SCORE
    if not bool(scores[visible].isfinite().all()):
        raise InputError("function", "expected finite scores, got NaN or infinity")
    best: tuple[str, list[str]] | None = None
    for name, method in methods.items():
        for differences, reading, sign, shift in _readings(method):
            try:
                content, added = _score_parts(reading, query, key, sign, shift)
            except ValueError:  # positions that the method does not have
                continue
            parts = {"query . key": content, "the position term": added}
            factors = _fit(scores, visible, parts, returns_weights)
            if factors is None:
                continue
            scaled = [f"{part} is multiplied by {factor:.6g}" for part, factor in factors.items() if factor != 1]
            if best is None or len(differences + scaled) < len(best[1]):
                best = name, differences + scaled
    if best is None:
        return "no method explains these scores"
    name, differences = best
    return f"{name}, but {' and '.join(differences)}" if differences else f"this is {name}"


def _readings(method: PositionMethod) -> Iterator[tuple[list[str], PositionMethod, int, int]]:
    """Yield the ways to read a method: how each differs, the method, and the sign and shift of its offsets."""
    layouts = [None, *(layout for part in method.components() if isinstance(part, Rope) for layout in LAYOUTS)]
    has_tables = any(parameter.dim() > 1 for parameter in method.parameters())
    tables = list(TABLES) if has_tables else ["as it is"]
    for table, layout, shift, sign in itertools.product(tables, layouts, (0, 1, -1, 2, -2), (1, -1)):
        reading = copy.deepcopy(method).double().eval()
        differences = ["the sign of offsets is wrong"] if sign < 0 else []
        differences += [f"offsets are off by {shift:+d}"] if shift else []
        differences += [f"a table is {table}"] if table != "as it is" else []
        for part in reading.components():
            if isinstance(part, Rope) and layout not in (None, part.layout):
                part.layout = layout
                differences.append(f"features are paired as {layout!r}")
        for parameter in reading.parameters():
            if parameter.dim() > 1:
                parameter.data = TABLES[table](parameter.data)
        yield differences, reading, sign, shift


def _score_parts(method: PositionMethod, query: Tensor, key: Tensor, sign: int, shift: int) -> tuple[Tensor, Tensor]:
    """Return query . key after ``transform_qkv``, and what terms add to it, (heads, n, n) each."""
    tokens = torch.arange(query.shape[2])
    site = Site(sign * tokens, sign * (tokens + shift))  # an offset is key - query
    hidden = query.new_zeros(1, len(tokens), method.model.hidden_size)
    rows, keys, value, terms = method.apply_hooks(hidden, query, key, key, site)
    positions: dict[str, Any] = {"query_positions": site.query_positions, "key_positions": site.key_positions}

    def scores_with(terms: tuple[Term, ...]) -> Tensor:
        _, lse = attention(rows, keys, value, terms, return_lse=True, backend="reference", **positions)
        return (attention_weights(rows, keys, value, terms, **positions).log() + lse.unsqueeze(-1))[0]

    content = scores_with(()) if method.uses_query_key and rows is not None else torch.zeros_like(scores_with(terms))
    return content, scores_with(terms) - content


def _fit(scores: Tensor, visible: Tensor, parts: Mapping[str, Tensor], is_centered: bool) -> dict[str, float] | None:
    """Return the factors of the parts whose sum are the scores; None if there are none.

    Args:
        scores, visible: (heads, n, n).
        parts: (heads, n, n) each; those that are zero everywhere are left out.
        is_centered: compare deviations from the mean of each row, because weights do not show a constant of a row.
    """
    parts = {name: part for name, part in parts.items() if bool(part[visible].abs().max() > 1e-9)}
    target, *columns = scores, *parts.values()
    if is_centered:
        shown = [part.masked_fill(~visible, 0) for part in (target, *columns)]
        target, *columns = (part - part.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True) for part in shown)
    if not columns:
        return None
    matrix, right = torch.stack([column[visible] for column in columns], -1), target[visible]
    factors = torch.linalg.lstsq(matrix, right.unsqueeze(-1)).solution[:, 0]
    if bool((matrix @ factors - right).abs().max() > TOLERANCE * right.abs().max()):
        return None
    rounded = [1.0 if abs(factor - 1) <= 1e-3 else factor for factor in factors.tolist()]
    return dict(zip(parts, rounded, strict=True))
