"""Whether a way computes what it should, before it is timed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...errors import InputError
from .cases import Case, make_problem
from .settings import BenchSettings
from .ways import Way, backend, make_step

CHECKED_LENGTH = 160
"""Keys when a way is checked: beyond the reach of every table with one."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""How far the norm of an error may be from zero, relative to the norm of what is right."""


class WrongError(Exception):
    """A way doesn't compute what the reference does."""


def check(way: Way, case: Case, device: torch.device) -> float:
    """The largest relative error of a way's output and gradients, against the reference in float64 at a small length.

    Raises:
        WrongError: if it is too large.
        Exception: what the way raises.
    """
    problem = make_problem(replace(case, n=CHECKED_LENGTH, batch=2, heads=2), device)
    wanted = make_step(backend("reference", way.ignores_terms), problem.exact())()
    found = make_step(way, problem)()
    names = ["output", "query", "key", "value", *problem.parameters][: len(wanted)]
    worst = 0.0
    for name, got, want in zip(names, found, wanted, strict=True):
        if got.shape != want.shape:
            raise WrongError(f"wrong: {name} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
        error = relative_error(got, want)
        if not error <= TOLERANCE[case.dtype]:
            what = name if name == "output" else f"gradient of {name}"
            raise WrongError(f"wrong: {what} is off by {error:.1e} of its size")
        worst = max(worst, error)
    return worst


def relative_error(got: Tensor, want: Tensor) -> float:
    """The norm of the difference by that of what is wanted."""
    size = float(want.norm())
    off = float((got.to(want) - want).norm())
    return off / size if size else off


def in_a_line(error: BaseException) -> str:
    """An exception as one line for a table's note."""
    message = " ".join(str(error).split())
    if isinstance(error, WrongError):
        return message
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def check_backend(name: str, settings: BenchSettings) -> None:
    """Raise unless a backend can compute a small case here, in each dtype.

    Raises:
        InputError: with the backend's own reason.
    """
    for dtype in settings.dtypes:
        case = Case("bias", 16, 1, 1, settings.head_dim, dtype, False)
        try:
            make_step(backend(name), make_problem(case, settings.device))()
        except Exception as error:
            raise InputError("backends", f"{name} can't run here: {in_a_line(error)}") from None
