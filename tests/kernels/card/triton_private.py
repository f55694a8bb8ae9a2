"""Every private name of Triton that the card uses, behind functions with public names, so that only this module has to
follow when Triton changes one.

Its interpreter is made for a process in which nothing is compiled. Here, kernels are compiled, and then interpreted:
Triton's language is the interpreter's while a kernel runs, and the compiler's otherwise.
"""

import functools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from tests.kernels.interpreter import mend


def stop_after_reading() -> None:
    """Let the compiler read and check kernels, and write no code for a GPU, which takes seconds for each."""
    unused = {"name": "kernel", "shared": 0, "tmem_size": 0, "tensordesc_meta": None}
    unused |= {
        f"{kind}_scratch_{fact}": int(fact == "align") for kind in ("global", "profile") for fact in ("size", "align")
    }

    def finish(source: Any, metadata: dict[str, Any]) -> bytes:
        metadata |= unused
        return b"no code"

    def change_stages(backend: Any = None, stages: Any = None, *rest: Any) -> tuple[str, str]:
        if stages is not None:
            for stage in ("ttgir", "llir", "ptx"):
                del stages[stage]
            stages["cubin"] = finish
        return "card", "card"

    knobs.runtime.add_stages_inspection_hook = change_stages


def arguments_of(source: Any, numbers: dict[tuple[int, ...], Any]) -> dict[str, Any]:
    """Return a kernel's arguments as the interpreter takes them: those that were passed, and those compiled into it.

    Args:
        source: what the kernel was compiled from.
        numbers: addresses and numbers by their places in the arguments, which may be tuples of tuples.
    """

    def decode(kinds: Any, outer: tuple[int, ...] = ()) -> Iterator[Any]:
        for index, kind in enumerate(kinds):
            path = (*outer, index)
            if isinstance(kind, tuple):
                parts = list(decode(kind, path))
                yield type(kind)(*parts) if hasattr(kind, "_fields") else tl.tuple(parts)
            elif kind == "constexpr":
                value = source.constants[path]
                # Triton compiles the number 1 in, too; to the kernel it is a number.
                is_number = type(value) is int and (outer or index not in source.fn.constexprs)
                yield interpreter._implicit_cvt(value) if is_number else value
            else:
                dtype = tl.str_to_ty(kind, None)
                data = np.array([numbers[path]], np.uint64 if dtype.is_ptr() else interpreter._get_np_dtype(dtype))
                yield tl.core.tensor(interpreter.TensorHandle(data, dtype), dtype)

    return dict(zip(source.fn.arg_names, decode(source.signature.values()), strict=True))


def interpret(kernel: JITFunction, grid: tuple[int, int, int], arguments: dict[str, Any]) -> None:
    """Run all programs of a kernel, one after another."""
    function = _twin(kernel.fn).rewrite()
    patch, builder = interpreter._patch_lang, interpreter.interpreter_builder
    scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: None  # once is enough, and it is undone below
    try:
        builder.set_grid_dim(*grid)
        for index in range(grid[0]):
            builder.set_grid_idx(index, 0, 0)
            function(**arguments)
    finally:
        interpreter._patch_lang = patch
        scope.restore()


@functools.cache
def _twin(function: Callable[..., Any]) -> interpreter.InterpretedFunction:
    """Return a kernel's Python function as the interpreter runs it."""
    return interpreter.InterpretedFunction(function)


def prepare(check: Callable[[str, np.ndarray, np.ndarray, int], None]) -> None:
    """Let the interpreter run compiled kernels, and ``check`` every access of theirs to memory.

    Args:
        check: gets "load" or "store", addresses, which of them are used, and the bytes at each.
    """
    # A compiled kernel calls others only while it is interpreted.
    JITFunction.__call__ = lambda self, *arguments, **options: _twin(self.fn)(*arguments, **options)
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        mend()
    finally:
        del os.environ["TRITON_INTERPRET"]
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def check_access(access: str, pointers: Any, mask: Any) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        check(access, pointers.data, np.broadcast_to(mask.data, pointers.data.shape), size)

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check_access("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check_access("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
