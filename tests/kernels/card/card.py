"""An emulated GPU, the "card": everything that the host does for a GPU is real, and kernels are interpreted.

Triton reads kernels for a GPU of some compute capability, and its own launcher, in C, launches them on a driver that is
``driver.c``. This calls back with each launch: the kernel's handle, the grid, the stream and the parameters in memory.
They are decoded by the signature that the kernel was compiled with, as a GPU would, and the kernel is interpreted on
the same addresses, which are the host's. So calls are recorded, written and replayed as on a GPU, and their numbers can
be compared with others.

All of torch's memory comes from ``memory.cpp``: it begins as NaN and is NaN again once freed. A kernel that reads or
writes where nothing is allocated, or that gets a number that 16 does not divide although it was compiled for one that
16 divides, raises a :class:`GpuError`.

Programs run one after another, so races are not seen, nor what tensor cores round, nor times. Triton reads variables of
the environment when it is first imported, so that a process of its own, without TRITON_INTERPRET, imports this first.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).resolve().parent
BUILT = FOLDER / "built"


def _missing() -> str | None:
    """Return why the card cannot be used here; None if it can."""
    if find_spec("triton") is None:
        return "needs Triton, which is not installed"
    if torch.cuda.is_available():
        return "stands in for a GPU, and there is one"
    for command in ("cc", "c++"):
        if shutil.which(command) is None:
            return f"needs the compiler {command}, which is not installed"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "needs Python.h, with which Triton compiles its launcher"
    return None


if (_reason := _missing()) is not None:
    pytest.skip(_reason, allow_module_level=True)
if "triton" in sys.modules:
    raise RuntimeError("the card needs a process in which nothing else has imported Triton: use `make test-card`")


def _build(source: str, name: str, *flags: str | Path) -> ctypes.CDLL:
    """Compile a source beside this file, unless that has been done, and load it."""
    library = BUILT / name
    if not library.exists() or library.stat().st_mtime < (FOLDER / source).stat().st_mtime:
        BUILT.mkdir(exist_ok=True)
        unfinished = BUILT / f"{name}.{os.getpid()}"
        compiler = "cc" if source.endswith(".c") else "c++"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", FOLDER / source, "-o", unfinished, *flags], check=True)
        unfinished.replace(library)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_LIBCUDA_PATH"] = str(BUILT)
# Triton's own cache would serve kernels without code to a GPU.
os.environ["TRITON_CACHE_DIR"] = str(BUILT / "cache")
_driver = _build("driver.c", "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
_torch = Path(torch.__file__).parent
_memory = _build(
    "memory.cpp", f"memory-{torch.__version__}.so", "-std=c++20", f"-I{_torch}/include", f"-L{_torch}/lib", "-lc10"
)
_memory.card_first_wrong.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
_memory.card_first_wrong.restype = ctypes.c_long

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tests.kernels.card import triton_private  # noqa: E402
from whereformer.kernels import tracing  # noqa: E402
from whereformer.kernels.triton import available  # noqa: E402

_AS_PASSED = {"i1": "i4", "u1": "u4", "fp16": "f2", "fp32": "f4", "fp64": "f8"}
_AS_PASSED |= {f"{kind}{bits}": f"{kind}{bits // 8}" for kind in "iu" for bits in (8, 16, 32, 64)}
"""How the launcher passes numbers, in NumPy's words."""


class GpuError(Exception):
    """An error that a GPU would not report, but compute wrong numbers with."""


class Kernel(NamedTuple):
    """A compiled kernel: its source in Triton, and what the compiler says about it."""

    source: Any
    metadata: Any


class Launch(NamedTuple):
    """A launch as the driver got it; ``numbers`` are its parameters and addresses, by their places in the arguments."""

    kernel: Kernel
    grid: tuple[int, int, int]
    stream: int
    numbers: dict[tuple[int, ...], int | float]

    @property
    def name(self) -> str:
        name: str = self.kernel.source.fn.__name__
        return name

    def addresses(self) -> set[tuple[int, ...]]:
        """Return the places of the parameters that are addresses."""
        return {path for path, kind in _leaves(self.kernel.source) if kind.startswith("*")}

    def run(self) -> None:
        """Interpret the kernel, after checking what its compiler was told about the parameters."""
        source = self.kernel.source
        for path, attributes in source.attrs.items():
            for attribute, value in attributes:
                if attribute == "tt.divisibility" and self.numbers.get(path, 0) % value:
                    raise GpuError(f"{self.name}: {value} does not divide parameter {path}, {self.numbers[path]}")
        triton_private.interpret(source.fn, self.grid, triton_private.arguments_of(source, self.numbers))


launches: list[Launch] = []
"""All launches, the last one last."""


class Card(CudaDriver):
    """Triton's driver of the card. Tests may change what is current."""

    capability, device, stream = 90, 0, 7

    def __init__(self) -> None:
        self.utils, self.launcher_cls = CudaUtils(), _Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return self.stream if device == self.device else -1


_kernels: dict[int, Kernel] = {}
_errors: list[BaseException] = []
_lock = threading.RLock()
"""The interpreter changes Triton's language while it runs, so that nothing can be compiled meanwhile."""


class _Launcher(CudaLauncher):
    """Triton's launcher, which knows what it launches, and raises what the interpreter has raised."""

    def __init__(self, source: Any, metadata: Any) -> None:
        super().__init__(source, metadata)
        self.kernel = Kernel(source, metadata)

    def __call__(self, *arguments: Any) -> None:
        # A replay's launcher has a signature of its own, but its kernels have been launched by Triton's before.
        _kernels.setdefault(arguments[4], self.kernel)
        try:
            super().__call__(*arguments)
        finally:
            if _errors:
                raise _errors.pop()


@ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint), ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
)
def _launched(function: int, grid: Any, stream: int, parameters: Any) -> int:
    try:
        with _lock:
            kernel = _kernels[function]
            numbers = {path: _number(kind, parameters[i]) for i, (path, kind) in enumerate(_leaves(kernel.source))}
            launches.append(Launch(kernel, tuple(grid[:3]), stream, numbers))
            launches[-1].run()
    except BaseException as error:  # C has no exceptions
        _errors.append(_cause(error))
        return 1
    return 0


def _cause(error: BaseException) -> BaseException:
    """Return the error that the interpreter has wrapped, if it is ours."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, GpuError):
        cause = cause.__cause__
    return cause or error


def _number(kind: str, address: int) -> Any:
    dtype = np.dtype("u8" if kind.startswith("*") else _AS_PASSED[kind])
    return np.frombuffer(ctypes.string_at(address, dtype.itemsize), dtype).item()


def _leaves(source: Any) -> list[tuple[tuple[int, ...], str]]:
    """Return the places of the parameters in the kernel's arguments, which may be tuples of tuples; and their types."""

    def walk(kinds: Any, outer: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
        for index, kind in enumerate(kinds):
            if isinstance(kind, tuple):
                yield from walk(kind, (*outer, index))
            elif kind != "constexpr":
                yield (*outer, index), kind

    return list(walk(source.signature.values()))


def _check_access(access: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
    """Raise unless a kernel's access is to memory that is allocated."""
    addresses, mask = np.ascontiguousarray(addresses), np.ascontiguousarray(mask, dtype=np.uint8)
    wrong = _memory.card_first_wrong(addresses.ctypes.data, mask.ctypes.data, addresses.size, size)
    if wrong >= 0:
        raise GpuError(f"a {access} of {size} bytes at {addresses.flat[wrong]:#x}, where nothing is allocated")


def set_capability(capability: int) -> None:
    """Make the card a GPU of another compute capability, times 10, for which kernels are compiled again."""
    Card.capability = capability
    for kernel in _kernels.values():
        kernel.source.fn.device_caches.clear()


@contextlib.contextmanager
def keeping_memory() -> Iterator[None]:
    """Within this context, what is freed stays as it is, like the memory of a CUDA graph."""
    _memory.card_keep_memory(1)
    try:
        yield
    finally:
        _memory.card_keep_memory(0)


def _install() -> None:
    """Make the card Triton's GPU, and let the package take the host's tensors for its tensors."""
    run = JITFunction.run

    def run_alone(self: Any, *arguments: Any, **options: Any) -> Any:
        with _lock:
            return run(self, *arguments, **options)

    JITFunction.run = run_alone
    triton_private.prepare(_check_access)
    triton_private.stop_after_reading()
    driver.set_active(Card())
    tracing.CPU_IGNORES_ALIGNMENT = False
    available._unavailable_on = lambda device: None
    torch.cuda.get_device_capability = lambda device: divmod(Card.capability, 10)
    _driver.card_call_on_launch(_launched)
    _memory.card_use_memory()


_install()
