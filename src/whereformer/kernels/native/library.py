"""The compiled library: why it cannot be used, or its functions and the instructions that it uses."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from ..torch_private import bfloat16_levels
from .build import FOLDER, LEVELS, LIBRARY, source_hash

REBUILD = "`python -m whereformer.kernels.native --build` builds it, or says what it lacks"

_BFLOAT16 = ("avx512bf16", "amx", "neonbf16")


class LoadedLibrary(NamedTuple):
    """A loaded library, the levels that it was compiled for, and the level that is used."""

    handle: ctypes.CDLL
    levels: tuple[str, ...]
    level: str


def find_library(folder: Path, path: Path, environment: Mapping[str, str]) -> LoadedLibrary | str:
    """Load the library at ``path``, of the sources in ``folder``, or return in one line why it cannot be used."""
    if environment.get("WHEREFORMER_NATIVE") == "0":
        return "is switched off by WHEREFORMER_NATIVE=0"
    if not path.exists():
        return f"is not built; {REBUILD}"
    try:
        handle = ctypes.CDLL(str(path))
        handle.whereformer_source.restype = handle.whereformer_levels.restype = ctypes.c_char_p
        handle.whereformer_attention.argtypes = [ctypes.c_void_p]
    except (OSError, AttributeError) as error:
        return f"cannot be loaded: {' '.join(str(error).split())}; {REBUILD}"
    source = source_hash(folder)
    if source and handle.whereformer_source().decode() != source:
        return f"was built from other sources; {REBUILD}"
    levels = tuple(handle.whereformer_levels().decode().split())
    level = environment.get("WHEREFORMER_TEST_LEVEL") or choose_level(levels)
    if level not in levels:
        return f"cannot use WHEREFORMER_TEST_LEVEL={level}: the library has {', '.join(levels)}"
    return LoadedLibrary(handle, levels, level)


def choose_level(levels: tuple[str, ...]) -> str:
    """Return the highest of a library's levels that the processor supports and torch, which may be limited, uses."""
    order = list(LEVELS)
    # Torch names only one level of AVX-512, and none of ARM.
    highest = {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability(), "base")
    supported = order[: order.index(highest) + 1]
    if highest == "avx512" or "neonbf16" in levels:
        supported += bfloat16_levels()
    return next(level for level in reversed(levels) if level in supported)


_library = find_library(FOLDER, Path(os.environ.get("WHEREFORMER_NATIVE_LIBRARY", LIBRARY)), os.environ)
"""Loaded once, when attention is first imported. Compiled programs read it as a constant in the functions below."""


def unsupported_reason() -> str | None:
    """Return in one line why the library cannot be used, such as "is not built: ..."; None if it can."""
    return _library if isinstance(_library, str) else None


def level_for(dtype: torch.dtype) -> int:
    """Return the index of the level for calls of a dtype: the highest levels only add products of bfloat16."""
    assert isinstance(_library, LoadedLibrary)
    usable = _library.levels[: _library.levels.index(_library.level) + 1]
    return max(usable.index(level) for level in usable if dtype == torch.bfloat16 or level not in _BFLOAT16)


def compute(address: int) -> None:
    """Compute the call of the struct at an address."""
    if isinstance(_library, str):
        raise RuntimeError(f"the compiled kernel {_library}")
    code = _library.handle.whereformer_attention(address)
    if code == 1:
        raise MemoryError("attention: no memory for the kernel's tiles")
    assert code == 0, "the library expects another struct"


def level() -> str:
    """Return the level that is used; empty if the library cannot be used."""
    return _library.level if isinstance(_library, LoadedLibrary) else ""
