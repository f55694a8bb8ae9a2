"""Fixes for Triton 3.6's interpreter, where it computes something else than a GPU."""

import os
from dataclasses import replace

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

from tests.kernels import tensor_cores


def mend() -> None:
    """Make bfloat16 mean bfloat16, and let loop bounds be tensors; once, and only where the interpreter runs."""
    builder = interpreter.InterpreterBuilder
    if os.environ.get("TRITON_INTERPRET") != "1" or hasattr(builder, "mended"):
        return
    builder.mended = True
    # Nothing reads the results of these checks, which take two fifths of the time.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    cast, dot = builder.cast_impl, builder.create_dot
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang

    def rounding_cast(self, source, to):
        """As cast_impl, which cuts float32 off where hardware rounds to the nearest bfloat16."""
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            bits = source.data.view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)
        return cast(self, source, to)

    def mended_dot(self, left, right, added, precision, *rest):
        """As create_dot, which multiplies the bits of bfloat16 as if they were whole numbers, and float32 exactly."""
        if left.dtype.scalar == tl.float32 and precision == ir.INPUT_PRECISION.TF32x3:
            return interpreter.TensorHandle(tensor_cores.dot(left.data, right.data) + added.data, tl.float32)
        return dot(self, *(widen(operand) for operand in (left, right)), added, precision, *rest)

    def widen(operand):
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def index_tensor(tensor, scope):
        """As _patch_lang_tensor, whose loop bounds are int(array of one), which NumPy 2.4 no longer allows."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patched = set()

    def patch_once(function):
        """As _patch_lang, which patches all of the language again for every call from one kernel to another."""
        modules = tuple(name for name, value in function.__globals__.items() if value is tl or value is tl.core)
        if modules in patched:
            return interpreter._LangPatchScope()
        patched.add(modules)
        scope = patch_language(function)
        restore = scope.restore

        def restore_once():
            patched.discard(modules)
            restore()

        scope.restore = restore_once
        return scope

    interpreter._patch_lang = patch_once
    builder.cast_impl, builder.create_dot = rounding_cast, mended_dot
    interpreter._patch_lang_tensor = index_tensor
