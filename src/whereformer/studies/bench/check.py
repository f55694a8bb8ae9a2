"""Check a way's output and gradients against the reference before it is timed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...errors import InputError
from .cases import Case, make_problem
from .ways import Way, backend, make_step

CHECKED_LENGTH = 160
"""Number of keys in a check, beyond the reach of the shorter tables."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""The largest norm of an error, relative to the norm of the correct tensor."""


class WrongError(Exception):
    """Raised if a way's result differs from the reference."""


def check(way: Way, case: Case, device: torch.device) -> float:
    """Return the largest relative error of a way's output and gradients, against the float64 reference, for short rows.

    Raises:
        WrongError: if the error is too large.
        Exception: whatever the way raises.
    """
    problem = way.simplify(make_problem(replace(case, n=CHECKED_LENGTH, batch=2, heads=2), device))
    wanted = make_step(backend("reference"), problem.exact())()
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
    """Return the norm of the difference divided by the norm of the wanted tensor."""
    size = float(want.norm())
    off = float((got.to(want) - want).norm())
    return off / size if size else off


def in_a_line(error: BaseException) -> str:
    """Format an exception as one line, for a table's note."""
    message = " ".join(str(error).split())
    if isinstance(error, WrongError):
        return message
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def check_backend(name: str, dtype: str, head_dim: int, device: torch.device) -> None:
    """Check that a backend can compute a small case on this machine in a dtype.

    Raises:
        InputError: if it can't, with the backend's own reason.
    """
    case = Case("bias", 16, 1, 1, head_dim, dtype, False)
    try:
        make_step(backend(name), make_problem(case, device))()
    except Exception as error:
        raise InputError("backends", f"{name} can't run here: {in_a_line(error)}") from None
