"""A description of the machine that numbers were measured on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from ..kernels.native.library import level


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine: processor, instructions, threads, Python, torch, system and a CUDA device's GPU."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "instructions": level() or torch.backends.cpu.get_cpu_capability().lower(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        **({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}),
    }
