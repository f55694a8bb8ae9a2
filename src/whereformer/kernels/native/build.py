"""Compiles the kernel for the CPU.

Only the standard library is imported here, and nothing of the package: ``hatch_build.py`` runs this file by its path,
in an environment without torch.

Run: python src/whereformer/kernels/native/build.py [--emulated] [LIBRARY]
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
from dataclasses import dataclass
from pathlib import Path

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
}
"""The instructions that the kernel is compiled for, from few to many, and the flags of each."""

EMULATED = ("avx512bf16", "amx")
"""The levels with code of their own, which any processor with AVX2 can test: every instruction that they name has a
portable twin, and a library for tests has that instead."""

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
    """Whether a library is that of the sources, whose hash is in it."""
    source = source_hash(folder)
    return source != "" and target.exists() and source.encode() in target.read_bytes()


def build(folder: Path = FOLDER, target: Path = LIBRARY, emulated: bool = False) -> str:
    """Compile the sources, move the library into its place, and return in one line what was built.

    Args:
        folder: where ``library.cpp`` and ``attention.cpp`` are.
        target: the library's file.
        emulated: whether the levels above AVX2 use its instructions instead of their own; for tests.

    Raises:
        BuildError: if there is no library, or nowhere to put it. An older library stays as it is.
    """
    source = source_hash(folder)
    if not source:
        raise BuildError("the folder has no C++ sources")
    if sys.platform == "win32":
        raise BuildError("Windows is not supported")
    if sys.maxsize < 2**32:
        raise BuildError("this is a 32-bit Python")
    command = _compiler()
    try:
        # Beside the target, so that no time is lost if that cannot be written, and the library takes its place at once.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".native-") as temporary:
            compiler = _Compiler(command, folder, Path(temporary), shlex.split(os.environ.get("CXXFLAGS", "")))
            version = compiler.run("--version").partition("\n")[0].strip()
            levels, left_out, objects = _compile_levels(compiler, emulated)
            given = [f"-DLEVELS(f)={' '.join(f'f({level})' for level in levels)}", f'-DSOURCE="{source}"']
            library = compiler.compile("library.cpp", "library.o", *given, *["-DEMULATED"] * emulated)
            made = Path(temporary, target.name)
            compiler.link([library, *objects], made)
            if not made.exists():
                raise BuildError(f"{Path(command[0]).name} made no library")
            os.replace(made, target)
    except OSError as error:
        raise BuildError(f"cannot write {target} ({error.strerror})") from None
    without = "".join(f"; without {level}: {line}" for level, line in left_out.items())
    return f"built the kernel for the CPU by {version} for {', '.join(levels)}{without}"


def attempt(folder: Path = FOLDER, target: Path = LIBRARY, emulated: bool = False) -> str:
    """Build unless the library is that of these sources, and return in one line what became of it."""
    if is_current(folder, target):
        return "the kernel for the CPU is built"
    try:
        return build(folder, target, emulated)
    except BuildError as error:
        return f"the kernel for the CPU is not built: {error}"


def _compiler() -> list[str]:
    """Return the command of the compiler: ``$CXX``, or the first that there is."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for names in [chosen] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(names[0]):
            return names
    tried = f"CXX={chosen[0]}" if chosen else ", ".join(COMPILERS)
    raise BuildError(f"no C++ compiler found (tried {tried})")


def _compile_levels(compiler: _Compiler, emulated: bool) -> tuple[list[str], dict[str, str], list[str]]:
    """Compile the kernel for every level at the same time: the levels, why others are missing, and the objects."""
    levels = list(LEVELS) if platform.machine().lower() in ("x86_64", "amd64") else ["base"]
    if emulated:
        levels = [level for level in levels if level in ("base", "avx2", *EMULATED)]

    def compile_level(level: str) -> str | BuildError:
        flags = LEVELS["avx2" if emulated and level in EMULATED else level]
        try:
            return compiler.compile("attention.cpp", f"{level}.o", *flags, f"-DLEVEL={level}")
        except BuildError as error:
            return error

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # The last levels take longest, so they begin first.
    with ThreadPoolExecutor(cores) as pool:
        results = dict(zip(reversed(levels), pool.map(compile_level, reversed(levels)), strict=True))
    if isinstance(error := results["base"], BuildError):
        raise error
    objects = {level: result for level in levels if isinstance(result := results[level], str)}
    left_out = {level: str(results[level]) for level in levels if level not in objects}
    return list(objects), left_out, list(objects.values())


@dataclass(frozen=True)
class _Compiler:
    """A compiler with its command, the folder of the sources, that of its output, and the flags that the user adds."""

    command: list[str]
    folder: Path
    output: Path
    own_flags: list[str]

    def compile(self, source: str, name: str, *flags: str) -> str:
        """Compile a source and return the object's path."""
        target = str(self.output / name)
        self.run("-c", *COMMON, *flags, *self.own_flags, source, "-o", target)
        return target

    def link(self, objects: list[str], target: Path) -> None:
        """Link the library, where possible with the C++ library inside and its names hidden.

        Then it runs where that library is older or missing, and never uses another copy of it.
        """
        flags = ["-shared", "-pthread", *self.own_flags, *objects, "-o", str(target)]
        inside = ["-static-libgcc", "-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections"]
        # Some distributions have the static library in a package of its own.
        with suppress(BuildError):
            if sys.platform != "darwin":
                self.run(*flags, *inside)
                return
        self.run(*flags)

    def run(self, *arguments: str) -> str:
        """Run the compiler and return its output.

        Raises:
            BuildError: if it cannot be started, or fails.
        """
        name = Path(self.command[0]).name
        try:
            done = subprocess.run(
                [*self.command, *arguments],
                cwd=self.folder,
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise BuildError(f"{name} cannot be started ({error.strerror})") from None
        if done.returncode:
            raise BuildError(f"{name} failed: {_first_error(done.stdout, done.returncode)}")
        return done.stdout


def _first_error(text: str, code: int) -> str:
    """The first line of a compiler's output that tells of an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
    return found[:300] or (f"it ended by signal {-code}" if code < 0 else f"it ended with code {code}")


if __name__ == "__main__":
    is_emulated, *given = sys.argv[1:2] == ["--emulated"], *sys.argv[1:]
    library = Path(given[-1]).resolve() if given[is_emulated:] else LIBRARY
    # It succeeds in any case: the package works without.
    print(f"whereformer: {attempt(FOLDER, library, is_emulated)}")
