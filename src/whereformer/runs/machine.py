"""What numbers were measured on, and with which code."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import __version__


def machine(device: torch.device) -> dict[str, Any]:
    """The processor, the versions and the commit that numbers come from, by name."""
    return {
        "cpu": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "whereformer": __version__,
        "commit": commit(),
        "system": f"{platform.system()} {platform.machine()}",
        **({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}),
    }


@cache
def commit() -> str | None:
    """The commit of the running code, with "+changes" where tracked files differ from it; None outside a checkout."""
    # An installed package may lie within the checkout of another project, which does not track it.
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found = _git("rev-parse", "--short=12", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return found and found + ("+changes" if changes else "")


def _git(*arguments: str) -> str | None:
    """What git prints in the folder of this package; None if it fails or is missing."""
    command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
