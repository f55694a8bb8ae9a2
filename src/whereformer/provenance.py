"""Where numbers come from: the date, the machine, library versions and the commit of the source."""

from __future__ import annotations

import platform
import re
import subprocess
from contextlib import suppress
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .kernels.native.library import level
from .version import __version__


@cache
def commit() -> str | None:
    """Return the commit of the running source as 40 hexadecimal digits.

    It ends in ``-dirty`` if a file in the checkout differs from that commit. It is None for an installed package, even
    one whose environment lies inside the checkout of another project.
    """
    if _git("ls-files", "--error-unmatch", __file__) is None:
        return None
    return _git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(*arguments: str) -> str | None:
    """Run git in the package's own folder and return its output; None if it fails or git is not installed."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that are measured or compared with, if installed."""
    installed = {"python": platform.python_version(), "torch": torch.__version__, "whereformer": __version__}
    for name in ("triton", "transformers"):
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def this_version() -> str:
    """Return the version of this package, which is stored with every result."""
    return versions()["whereformer"]


def machine(device: torch.device) -> dict[str, object]:
    """Describe the machine: processor, instructions, threads, Python, torch, system and a CUDA device's GPU.

    The instructions are the compiled kernel's. Without a compiled kernel, they are torch's, and the text says so.
    """
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next(iter(re.findall("^model name.*?: *(.*)", info.read_text(), re.MULTILINE)), cpu).strip()
    return {
        "cpu": cpu,
        "instructions": level() or f"{torch.backends.cpu.get_cpu_capability().lower()} without the compiled kernel",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        **({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}),
    }


def provenance(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the fields that every results file begins with: date, commit, machine and versions."""
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": machine(torch.device(device)),
        "versions": versions(),
    }
