"""Writes results with where they come from: the date, the commit, the machine and the versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from whereformer.files import write_atomically
from whereformer.provenance import provenance


def write_results(path: Path, results: Mapping[str, object], device: torch.device | str = "cpu") -> None:
    """Write results as JSON, with their provenance first. The folder is created if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({**provenance(device), **results}, indent=1, allow_nan=False) + "\n")
