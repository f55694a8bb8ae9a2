"""Compiles the kernel for the CPU.

Only the standard library is imported here, and nothing of the package: ``hatch_build.py`` runs this file by its path,
in an environment without torch.

Run: python src/whereformer/kernels/native/build.py [LIBRARY]
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / ("_native.dylib" if sys.platform == "darwin" else "_native.so")

COMMON = (
    *("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-std=c++17", "-fPIC", "-fvisibility=hidden"),
    *("-pthread", "-Wall", "-Wno-psabi", "-Wno-maybe-uninitialized"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
_BF16 = (*_AVX512, "-mavx512bf16")
LEVELS: dict[str, tuple[str, ...]] = {
    "base": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512,
    "avx512bf16": _BF16,
    "amx": (*_BF16, "-mamx-tile", "-mamx-bf16"),
    "neonbf16": ("-march=armv8.2-a+bf16",),
}
"""The instructions that the kernel is compiled for, from few to many, and the flags of each. "base" is SSE2 or NEON."""

COMPILERS = ("c++", "g++", "clang++")


class BuildError(Exception):
    """The kernel cannot be built; the message is one line that says why."""


def source_hash(folder: Path) -> str:
    """Return a hash of the sources and flags; empty if the folder has no sources."""
    files = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
    if not files:
        return ""
    digest = hashlib.sha256(repr((COMMON, LEVELS)).encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()[:16]


def is_current(folder: Path, target: Path) -> bool:
    """Whether a library was built from the sources, whose hash it contains."""
    source = source_hash(folder)
    return source != "" and target.exists() and source.encode() in target.read_bytes()


def build(folder: Path = FOLDER, target: Path = LIBRARY) -> str:
    """Compile ``library.cpp`` and ``attention.cpp`` of a folder to the file ``target``, and return a line about that.

    Raises:
        BuildError: if it cannot be compiled or written. An older library does not change then.
    """
    source = source_hash(folder)
    if not source:
        raise BuildError("the folder has no C++ sources")
    if sys.platform == "win32":
        raise BuildError("Windows is not supported")
    command = _compiler()
    flags = shlex.split(os.environ.get("CXXFLAGS", ""))
    try:
        levels = levels_of(command)
        # In the target's folder, so that a folder that cannot be written fails at once, and one rename puts the library
        # in place.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".native-") as temporary:

            def compile_file(file: str, name: str, *file_flags: str) -> str:
                target = str(Path(temporary, f"{name}.o"))
                _run(command, folder, "-c", *COMMON, *file_flags, *flags, file, "-o", target)
                return target

            # The last levels take longest, so they begin first.
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                jobs = {
                    level: pool.submit(compile_file, "attention.cpp", level, *LEVELS[level], f"-DLEVEL={level}")
                    for level in reversed(levels)
                }
            # Older compilers do not know the last levels.
            refused = {
                level: jobs[level].exception() for level in levels if level != "base" and jobs[level].exception()
            }
            levels = [level for level in levels if level not in refused]
            objects = [jobs[level].result() for level in levels]
            names = " ".join(f"f({level})" for level in levels)
            objects.append(compile_file("library.cpp", "library", f"-DLEVELS(f)={names}", f'-DSOURCE="{source}"'))
            library = Path(temporary, target.name)
            _link(command, folder, [*flags, *objects, "-o", str(library)])
            os.replace(library, target)
    except OSError as error:
        raise BuildError(str(error)) from None
    without = "".join(f"; without {level}: {error}" for level, error in refused.items())
    return f"built the kernel for the CPU by {' '.join(command)} for {', '.join(levels)}{without}"


def attempt(folder: Path = FOLDER, target: Path = LIBRARY) -> str:
    """Build the library unless it was built from these sources, and return a line about the result."""
    if is_current(folder, target):
        return "the kernel for the CPU is built"
    try:
        return build(folder, target)
    except BuildError as error:
        return f"the kernel for the CPU is not built: {error}"


def _compiler() -> list[str]:
    """Return the command of the compiler: ``$CXX``, or the first that is installed."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for names in [chosen] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(names[0]):
            return names
    candidates = f"CXX={chosen[0]}" if chosen else ", ".join(COMPILERS)
    raise BuildError(f"no C++ compiler found (tried {candidates})")


def levels_of(command: list[str]) -> list[str]:
    """Return the levels of the processors that a compiler compiles for, which may be another kind than this one."""
    done = subprocess.run([*command, "-dumpmachine"], capture_output=True, text=True, check=False)
    machine = done.stdout.partition("-")[0] or platform.machine().lower()
    is_x86, is_arm = machine in ("x86_64", "amd64"), machine in ("aarch64", "arm64")
    return [level for level in LEVELS if level == "base" or (is_arm if level == "neonbf16" else is_x86)]


def _link(command: list[str], folder: Path, arguments: list[str]) -> None:
    """Link the library, where possible with a hidden copy of the C++ library inside.

    Then it runs where the C++ library is older or missing, and never uses another copy of it.
    """
    inside = ["-static-libgcc", "-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections"]
    # Some distributions have the static library in a separate package.
    with suppress(BuildError):
        if sys.platform != "darwin":
            return _run(command, folder, "-shared", "-pthread", *arguments, *inside)
    return _run(command, folder, "-shared", "-pthread", *arguments)


def _run(command: list[str], folder: Path, *arguments: str) -> None:
    """Run the compiler; if it fails, raise a BuildError with the first line of its output that has an error."""
    run_options: dict[str, Any] = {"cwd": folder, "env": {**os.environ, "LC_ALL": "C"}, "stdin": subprocess.DEVNULL}
    run_options |= {"capture_output": True, "text": True, "errors": "replace"}
    done = subprocess.run([*command, *arguments], **run_options, check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        message = next((line for line in lines if "error" in line.lower()), f"it ended with code {done.returncode}")
        raise BuildError(f"{Path(command[0]).name} failed: {message[:300]}")


if __name__ == "__main__":
    # The exit status is 0 in any case: the package works without the kernel.
    print(f"whereformer: {attempt(FOLDER, Path(sys.argv[1]).resolve() if sys.argv[1:] else LIBRARY)}")
