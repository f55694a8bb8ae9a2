"""Position methods that a command names. Importing this is fast, so that a misspelled name is refused at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import InputError
from ..positions import build_position, method_class, method_names, own_name, position_names


def known_methods(named: str) -> list[str]:
    """Return the distinct methods of a comma-separated list; "all" stands for every method for text.

    Raises:
        InputError: for ``positions``, if there are none, or one is unknown.
    """
    names = position_names(for_text=True) if named.strip() == "all" else named.split(",")
    try:
        chosen = list(dict.fromkeys(own_name("".join(name.split())) for name in names if name.strip()))
        for name in chosen:
            for part in method_names(name):
                method_class(part)
    except InputError as error:
        raise about_method(error, "positions") from None
    if not chosen:
        raise InputError("positions", "expected at least one method, got none")
    return chosen


def check_methods(names: Iterable[str], **sizes: int) -> None:
    """Build each method once, where tables of any size take no memory, so that errors appear before any training.

    Raises:
        InputError: if one does not fit these sizes, those of :func:`whereformer.build_position`.
    """
    for name in names:
        try:
            with torch.device("meta"):
                build_position(name, **sizes)
        except (ValueError, TypeError) as error:
            problem = about_method(error, "positions")
            known = problem.reason if name in problem.reason else f"{name!r} does not fit: {problem.reason}"
            raise InputError("positions", known) from None


def about_method(error: Exception, field: str) -> InputError:
    """Turn a position method's error into one about ``field``, the setting that names the method."""
    if isinstance(error, InputError) and error.field == "position":
        return InputError(field, error.reason)
    return InputError(field, str(error))
