"""Where numbers come from: the day, the machine, the versions and the commit of the source."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .machine import machine
from .results import write_json


@cache
def commit() -> str | None:
    """The commit of the source that runs, as 40 hexadecimal digits.

    It ends in ``-dirty`` if a file of the checkout differs from that commit. None for an installed package: outside a
    checkout, and in an environment that only lies inside somebody else's.
    """
    if _git("ls-files", "--error-unmatch", __file__) is None:
        return None
    return _git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(*arguments: str) -> str | None:
    """What git prints about the package's own folder; None if it refuses, or is not there."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str]:
    """The versions of Python and of what is measured or compared with; a library that is not installed is left out."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "whereformer": __version__}
    for name in ("triton", "transformers", "x-transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def provenance(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What every file of results begins with."""
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": machine(torch.device(device)),
        "versions": versions(),
    }


def write_results(path: Path, results: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
    """Write results as JSON, after what they come from; the folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**provenance(device), **results}, indent=1)
