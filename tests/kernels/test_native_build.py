"""The kernel for the CPU is built and loaded, or one line says why not. A stub stands for the real sources."""

import _ctypes
import errno
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from whereformer.kernels.native import __main__ as command
from whereformer.kernels.native import build
from whereformer.kernels.native.build import BuildError, attempt
from whereformer.kernels.native.library import REBUILD, LoadedLibrary, choose_level, find_library

# The package has a function of this name.
library = sys.modules["whereformer.kernels.native.library"]
CXX = os.environ.get("CXX", "").split()[:1]
COMPILER = next(filter(None, map(shutil.which, CXX or build.COMPILERS)), None)
ON_X86 = platform.machine().lower() in ("x86_64", "amd64")
ALL = tuple(level for level in build.LEVELS if level != "neonbf16")
ARM = ("base", "neonbf16")
COMPILED = ALL if ON_X86 else ARM if platform.machine().lower() in ("aarch64", "arm64") else ("base",)
AND_BUILD = f"; {REBUILD}"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no kernel")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no compiler")
needs_elf = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have other libraries")

ATTENTION = """
#define JOIN(a, b) a##b
#define NAME(level) JOIN(attend_, level)
extern "C" void NAME(LEVEL)() {}
"""
LIBRARY = """
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED const char* whereformer_source(void) { return SOURCE; }
EXPORTED const char* whereformer_levels(void) { return LEVELS; }
EXPORTED int whereformer_attention(const void*) { return 0; }
"""
LEVELS = "\n".join(["#define LEVELS \\", *(f'  " {level}" \\' for level in COMPILED), ""])


@pytest.fixture(autouse=True)
def _no_flags_of_the_user(monkeypatch):
    for name in ("CXX", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)


def write_sources(folder):
    folder.mkdir()
    (folder / "attention.cpp").write_text(ATTENTION)
    (folder / "library.cpp").write_text(LEVELS + LIBRARY)
    return folder


@pytest.fixture
def sources(tmp_path):
    return write_sources(tmp_path / "sources")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Sources and the library that was built from them, which no test may change."""
    folder = write_sources(tmp_path_factory.mktemp("built") / "sources")
    build.build(folder, folder / "_native.so")
    return folder


@pytest.fixture
def copied(built, tmp_path):
    """A library and its sources that a test may change."""
    return shutil.copytree(built, tmp_path / "copied")


def compiler(tmp_path, monkeypatch, script):
    """Make a shell script the compiler."""
    file = tmp_path / "fake"
    file.write_text(script)
    file.chmod(0o755)
    monkeypatch.setenv("CXX", str(file))


def reason(folder):
    """Why a build fails, in one line. It leaves nothing behind."""
    target = folder.parent / "_native.so"
    before = sorted(folder.parent.iterdir())
    with pytest.raises(BuildError) as error:
        build.build(folder, target)
    assert sorted(folder.parent.iterdir()) == before
    assert "\n" not in str(error.value)
    return str(error.value)


@needs_compiler
def test_a_library_is_built_and_found(built):
    assert not [file for file in built.iterdir() if file.suffix not in (".cpp", ".so")]
    native = find_library(built, built / "_native.so", {})
    assert isinstance(native, LoadedLibrary)
    assert native.levels == COMPILED
    assert native.level == choose_level(native.levels)


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="there is no compiler for ARM")
def test_a_compiler_for_another_processor_compiles_its_levels(copied, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "aarch64-linux-gnu-g++")
    target = tmp_path / "arm.so"
    assert build.build(copied, target).endswith("by aarch64-linux-gnu-g++ for base, neonbf16")
    assert target.read_bytes()[18:20] == b"\xb7\x00"  # the number of ARM's 64-bit processors in an ELF header


@needs_compiler
def test_a_current_library_is_kept_and_another_replaced(copied):
    target = copied / "_native.so"
    before = target.stat().st_mtime_ns
    assert attempt(copied, target) == "the kernel for the CPU is built"
    assert target.stat().st_mtime_ns == before
    (copied / "simd.h").write_text("// new\n")
    assert attempt(copied, target).startswith("built the kernel for the CPU by ")
    assert target.stat().st_mtime_ns > before
    assert build.is_current(copied, target)


def test_without_a_compiler(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    expected = "no C++ compiler found (tried c++, g++, clang++)"
    assert reason(sources) == expected
    target = tmp_path / "_native.so"
    assert attempt(sources, target) == f"the kernel for the CPU is not built: {expected}"
    assert find_library(sources, target, {}) == f"is not built{AND_BUILD}"
    monkeypatch.setenv("CXX", "ccache g++-99")
    assert reason(sources) == "no C++ compiler found (tried CXX=ccache)"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("#!/bin/sh\nkill -KILL $$", "fake failed: it ended with code -9"),
        ("#!/bin/sh\necho hm\necho 'x.h:1: error: no'\nexit 1", "fake failed: x.h:1: error: no"),
        ("", ".*Exec format error.*fake'"),
    ],
    ids=["crash", "error", "no program"],
)
def test_a_broken_compiler(sources, tmp_path, monkeypatch, script, expected):
    compiler(tmp_path, monkeypatch, script)
    assert re.fullmatch(expected, reason(sources))


@needs_compiler
@pytest.mark.skipif(not ON_X86, reason="other processors have one level")
def test_levels_that_the_compiler_refuses_are_left_out(sources, tmp_path, monkeypatch):
    script = f'#!/bin/sh\ncase "$*" in *-mamx*) echo "error: option -mamx-tile"; exit 1;; esac\nexec {COMPILER} "$@"'
    compiler(tmp_path, monkeypatch, script)
    without = " for base, avx2, avx512, avx512bf16; without amx: fake failed: error: option -mamx-tile"
    assert build.build(sources, tmp_path / "_native.so").endswith(without)


@needs_compiler
def test_sources_with_an_error_leave_the_older_library(copied):
    target = copied / "_native.so"
    before = target.read_bytes()
    (copied / "library.cpp").write_text("int f() { return unknown; }\n")
    message = attempt(copied, target)
    assert "library.cpp:1:" in message
    assert str(copied) not in message
    assert target.read_bytes() == before
    assert find_library(copied, target, {}) == f"was built from other sources{AND_BUILD}"


@needs_compiler
def test_the_user_chooses_compiler_and_flags(sources, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\nexec {COMPILER} "$@"')
    monkeypatch.setenv("CXXFLAGS", "-O0 -DNAME='a b'")
    build.build(sources, tmp_path / "_native.so")
    _, *calls = (tmp_path / "calls").read_text().splitlines()  # the first asks for the processor
    assert all("-O0 -DNAME=a b" in call for call in calls)


@needs_compiler
def test_a_folder_that_cannot_be_written(sources, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refuse)
    assert reason(sources) == "[Errno 30] Read-only file system"


def test_a_folder_without_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    assert reason(tmp_path / "empty") == "the folder has no C++ sources"


@needs_compiler
def test_which_library_is_used(copied):
    target = copied / "_native.so"
    native = find_library(copied, target, {"WHEREFORMER_TEST_LEVEL": "base"})
    assert native.level == "base"
    problem = find_library(copied, target, {"WHEREFORMER_TEST_LEVEL": "sse"})
    assert problem == f"cannot use WHEREFORMER_TEST_LEVEL=sse: the library has {', '.join(native.levels)}"
    assert find_library(copied, target, {"WHEREFORMER_NATIVE": "0"}) == "is switched off by WHEREFORMER_NATIVE=0"
    assert find_library(copied, copied / "other.so", {}) == f"is not built{AND_BUILD}"
    (copied / "attention.cpp").write_text("// changed\n")
    assert find_library(copied, target, {}) == f"was built from other sources{AND_BUILD}"


def change(content, start, new):
    return content[:start] + new + content[start + len(new) :]


DAMAGED = {
    "empty": (lambda content: b"", "invalid ELF header|file too short"),
    "another processor": (lambda content: change(content, 18, b"\xb7\x00"), "cannot open shared object file.*"),
    "another library": (lambda content: Path(_ctypes.__file__).read_bytes(), "undefined symbol: whereformer_source"),
}


@needs_elf
@needs_compiler
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_library_that_cannot_be_loaded(kind, copied):
    damage, expected = DAMAGED[kind]
    target = copied / "_native.so"
    target.write_bytes(damage(target.read_bytes()))
    problem = find_library(copied, target, {})
    assert re.fullmatch(f"cannot be loaded: .*({expected}){re.escape(AND_BUILD)}", problem), problem


@pytest.mark.parametrize(
    ("compiled", "torch_uses", "halves", "expected"),
    [
        (ALL, "AVX512", ["avx512bf16", "amx"], "amx"),
        (ALL, "AVX512", ["avx512bf16"], "avx512bf16"),
        (ALL, "AVX512", [], "avx512"),
        (ALL[:2], "AVX512", ["avx512bf16"], "avx2"),
        (ALL, "AVX2", ["avx512bf16", "amx"], "avx2"),
        (ALL, "DEFAULT", [], "base"),
        (("base",), "SVE256", [], "base"),
        (ARM, "DEFAULT", [], "base"),
        (ARM, "DEFAULT", ["neonbf16"], "neonbf16"),
    ],
)
def test_the_level_is_the_highest_that_everything_admits(compiled, torch_uses, halves, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: torch_uses)
    monkeypatch.setattr(library, "bfloat16_levels", lambda: halves)
    assert choose_level(compiled) == expected


@pytest.mark.skipif(COMPILER is None or not sys.platform.startswith("linux"), reason="there is no compiler")
@pytest.mark.skipif(os.environ.get("WHEREFORMER_NATIVE") == "0", reason="it is switched off")
def test_the_kernel_is_built_where_a_compiler_is():
    """So that other tests do not skip it unseen."""
    assert library.unsupported_reason() is None


def show(monkeypatch, capsys, *arguments):
    """What the command prints, and its exit code."""
    monkeypatch.setattr(sys, "argv", ["native", *arguments])
    return command.main(), capsys.readouterr()


@needs_compiler
def test_the_command_says_what_is_used(built, monkeypatch, capsys):
    loaded = find_library(built, built / "_native.so", {"WHEREFORMER_TEST_LEVEL": "base"})
    monkeypatch.setattr(library, "_library", loaded)
    code, printed = show(monkeypatch, capsys)
    assert code == 0
    assert printed.out.startswith("used: base, ")


def test_the_command_says_why_nothing_is_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(library, "_library", find_library(tmp_path, tmp_path / "_native.so", {}))
    code, printed = show(monkeypatch, capsys)
    assert code == 1
    assert printed.out == f"not used: the kernel is not built{AND_BUILD}\n"


def test_the_command_tells_a_failed_build_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "none")
    monkeypatch.setattr(build, "is_current", lambda *_: False)
    monkeypatch.setattr(command, "is_current", lambda *_: False)
    code, printed = show(monkeypatch, capsys, "--build")
    assert code == 1
    assert printed.out == "the kernel for the CPU is not built: no C++ compiler found (tried CXX=none)\n"
