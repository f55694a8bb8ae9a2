"""Find the models to analyze, and give them names for the report."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError


@dataclass(frozen=True)
class ModelSource:
    """A model to analyze.

    Args:
        path: a folder, or an id on the Hugging Face Hub.
        name: a short and unique name.
        score: the score that the user gave, if any.
        step: the training step, for checkpoints of one run.
    """

    path: str
    name: str
    score: float | None = None
    step: int | None = None


def sources_of(models: Sequence[str], scores: Sequence[float] | None) -> list[ModelSource]:
    """Return the models to analyze. A folder with checkpoints means all of them, in the order of their steps.

    Raises:
        InputError: if a folder has no model, or the number of scores is not the number of models.
    """
    paths = [path for given in models for path in _expanded(given)]
    places = [Path(path).resolve() if os.path.exists(path) else path for path in paths]
    if len(set(places)) < len(places):
        twice = next(path for path, place in zip(paths, places, strict=True) if places.count(place) > 1)
        raise InputError("model", f"expected different ones, got {twice!r} twice")
    if scores is not None and len(scores) != len(paths):
        raise InputError("scores", f"expected one for each of {len(paths)} models, got {len(scores)}")
    steps = [_step(path) for path in paths]
    runs = {Path(path).resolve().parent for path, step in zip(paths, steps, strict=True) if step is not None}
    if len(runs) > 1 or steps.count(None) == len(steps):
        steps = [None] * len(steps)
    names = _names(paths)
    own: Sequence[float | None] = scores or [None] * len(paths)
    return [ModelSource(*each) for each in zip(paths, names, own, steps, strict=True)]


def _expanded(given: str) -> list[str]:
    folder = Path(given)
    if not given.strip():
        raise InputError("model", "expected a folder, or an id on the Hugging Face Hub, got ''")
    if os.path.isfile(given):
        raise InputError("model", f"expected a folder, or an id on the Hugging Face Hub, got the file {given!r}")
    if not os.path.isdir(given) or (folder / "config.json").exists():
        return [given]
    for place in (folder, folder / "checkpoints"):
        found = [path for path in place.glob("checkpoint-*") if _step(str(path)) is not None and path.is_dir()]
        if found:
            return sorted(map(str, found), key=lambda path: _step(path) or 0)
    if (folder / "model" / "config.json").exists():
        return [str(folder / "model")]
    raise InputError("model", f"expected a folder with a config.json, or with checkpoint-* folders, got {given!r}")


def _step(path: str) -> int | None:
    # What is not there, such as the id of a model on the Hub, need not be a path at all.
    match = re.fullmatch(r"checkpoint-(\d+)", (Path(path).resolve() if os.path.exists(path) else Path(path)).name)
    return int(match[1]) if match else None


def _names(paths: Sequence[str]) -> list[str]:
    """Name paths by their last parts, as many as tell them apart. A run's "model" folder is named after the run."""
    parts = []
    for path in paths:
        own = Path(path).resolve().parts if os.path.exists(path) else tuple(path.split("/"))
        parts.append(own[:-1] if own[-1] == "model" and len(own) > 2 else own)
    names = [own[-1] for own in parts]
    for count in range(2, max(map(len, parts)) + 1):
        longer = ["/".join(own[-count:]) for own in parts]
        names = [more if names.count(name) > 1 else name for more, name in zip(longer, names, strict=True)]
    return names if len(set(names)) == len(names) else list(paths)


def parsed_scores(text: str | None) -> list[float] | None:
    """Parse scores separated by commas.

    Raises:
        InputError: if one is not a finite number.
    """
    if text is None:
        return None
    for part in text.split(","):
        try:
            finite = math.isfinite(float(part))
        except ValueError:
            finite = False
        if not finite:
            raise InputError("scores", f"expected numbers separated by commas, got {part.strip()!r}")
    return list(map(float, text.split(",")))
