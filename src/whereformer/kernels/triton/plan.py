"""Replay functions: a call's work on the device, recorded once as a Python function that computes later calls like it.

To describe a call to the kernels takes many times as long as to start them. All of it follows from the dtypes, sizes
and strides of tensors, and from numbers. So the first call of a kind runs under a :class:`_Recorder`, which sees every
torch operation and every launch and notes them as lines of a Python function. In its launches, all parameters are
numbers, except for the addresses. The call's ``Plan`` (backend.py) keeps it; docs/architecture/debugging.md shows one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import lru_cache
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..backend import Replay
from ..precision import without_autocast
from ..torch_private import TorchDispatchMode, flatten_tree
from .available import is_interpreted

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

_logger = logging.getLogger(__name__)

_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)

_SMALL, _MAX_SMALL = 2**20, 2**23
"""Allocations of at most the first number of bytes share one block, if together they have at most the second."""

_ALLOCATIONS = frozenset({"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "empty_permuted"})


def launch(kernel: JITFunction[object], programs: int, *arguments: object, **options: int | str) -> None:
    """Launch a kernel, compiled with sums of products fused, whatever a version of Triton does by default."""
    compiled = kernel[(programs,)](*arguments, enable_fp_fusion=True, **options)
    if (recorder := _recorder.get()) is not None:
        recorder.add_launch(compiled, programs, dict(zip(kernel.arg_names, arguments, strict=False)))


def record(compute: Callable[[], Sequence[Tensor | None]], inputs: Sequence[Tensor]) -> tuple[Any, Replay | None]:
    """Run ``compute``; return its result and a function that replays it on other inputs, or None if it cannot be
    replayed, because the work depends on numbers in tensors.

    The function itself returns None while a profiler has hooks in Triton's launches: then it must not be used. Each of
    the ``inputs`` is a separate object, even if two are the same tensor, because in later calls they may be two.
    """
    device = inputs[0].device
    # Triton launches on the current device.
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.no_grad(), without_autocast(device), on_device:
        if is_interpreted():
            return compute(), None
        recorder = _Recorder(inputs)
        token = _recorder.set(recorder)
        try:
            with recorder:
                outputs = compute()
        finally:
            _recorder.reset(token)
        return outputs, recorder.build_function(outputs)


class _Address(NamedTuple):
    """The address of some bytes in a tensor: ``t4_ptr + 2048``."""

    tensor: str
    start: int = 0

    def render(self, blocks: Mapping[str, _Address]) -> str:
        """Return the address in Python; each tensor begins at an address in one of the ``blocks``."""
        block, start = blocks[self.tensor]
        start += self.start
        return f"{block}_ptr + {start}" if start else f"{block}_ptr"


class _Line(NamedTuple):
    """A line of a replay function: an operation, a launch or ``return``."""

    parts: Sequence[str | _Address]  # the line in Python; addresses are written when the memory is divided
    tensors: Sequence[str]  # the names of the tensors that it uses, except for addresses


class _Allocation(NamedTuple):
    """An allocation, such as ``empty((2, 8), (8, 1), dtype=float32, device=device)``."""

    code: str
    num_bytes: int


class _Recorder(TorchDispatchMode):
    """Notes torch operations and launches as lines.

    The line of an allocation or a view is written where the tensor is first used. Of the allocations that only launches
    use, those whose last use is the same line share one block of memory, and so do all small ones. The ``inputs`` are
    the call's tensors; all others have to be made while it records.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[int, str] = {}
        self.live_tensors: list[Tensor] = []  # an id is unique while its object lives
        self.addresses: dict[str, _Address] = {}  # of views, in the tensors that they are views of
        self.views: dict[str, _Line] = {}  # without a line yet
        self.allocations: dict[str, _Allocation] = {}  # likewise
        self.used_tensors: set[str] = set()  # by more than a launch
        self.lines: list[_Line] = []
        self.constants: dict[str, Any] = {"empty": torch.empty_strided, "device": inputs[0].device}
        self.can_replay, self.has_operations = True, False
        self.inputs = [self._add_tensor(tensor) for tensor in inputs]

    def __torch_dispatch__(self, operation: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results, name = operation(*args, **kwargs), operation.overloadpacket.__name__
        outputs = [leaf for leaf in flatten_tree(results) if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in flatten_tree((args, kwargs)) if isinstance(leaf, Tensor)]
        is_sequence, is_new = isinstance(results, tuple | list), [id(tensor) not in self.names for tensor in outputs]
        if name in ("detach", "alias"):
            self.live_tensors.append(outputs[0])
            self.names[id(outputs[0])] = self._name(inputs[0])
        elif name in _ALLOCATIONS:
            (tensor,) = outputs
            dtype = self._add_constant(str(tensor.dtype).removeprefix("torch."), tensor.dtype)
            code = f"empty({tuple(tensor.shape)}, {tensor.stride()}, dtype={dtype}, device=device)"
            self.allocations[self._add_tensor(tensor)] = _Allocation(code, tensor.untyped_storage().nbytes())
        elif operation.is_view:
            base = self._address(inputs[0])
            call, names = self._render_call(operation, args, kwargs), list(map(self._name, inputs))
            for index, view in enumerate(outputs):
                name, distance = self._add_tensor(view), view.data_ptr() - inputs[0].data_ptr()
                self.addresses[name] = base._replace(start=base.start + distance)
                self.views[name] = _Line([f"{name} = {call}[{index}]" if is_sequence else f"{name} = {call}"], names)
        elif not outputs and not inputs:
            pass  # such as the common type of two dtypes
        elif not outputs or any(is_new) != all(is_new):
            # It read a number, on which later work may depend, or is of an unknown kind.
            self.can_replay = False
        else:
            self.has_operations = True
            names = [self._use(self._name(tensor)) for tensor in inputs]
            call, new_names = self._render_call(operation, args, kwargs), ", ".join(map(self._add_tensor, outputs))
            code = f"{new_names}{',' * is_sequence} = {call}" if all(is_new) else call
            self.lines.append(_Line([code], names))
        return results

    def add_launch(self, compiled: CompiledKernel, programs: int, arguments: dict[str, object]) -> None:
        """Note a launch of a compiled kernel."""
        types: list[str] = []
        parts: list[str | _Address] = []
        for argument, signature in compiled.src.signature.items():
            for value, type_name in zip(flatten_tree(arguments.get(argument)), flatten_tree(signature), strict=True):
                if type_name != "constexpr":
                    types.append(type_name)
                    parts += [", ", self._address(value) if isinstance(value, Tensor) else repr(value)]
        self.can_replay &= all(part.tensor != "" for part in parts if isinstance(part, _Address))
        name = compiled.src.fn.__name__
        function = self._add_constant(name, compiled.function)
        metadata = self._add_constant(f"{name}_metadata", compiled.packed_metadata)
        run = self._add_constant(f"run_{name}", _find_launcher(tuple(types), compiled))
        code = f"{run}({programs}, 1, 1, stream, {function}, {metadata}, None, None, None"
        self.lines.append(_Line([code, *parts, ")"], []))

    def build_function(self, outputs: Sequence[Tensor | None]) -> Replay | None:
        """Return a function that runs the lines and returns the outputs; None if it cannot be replayed."""
        names = ["None" if tensor is None else self._use(self._name(tensor)) for tensor in outputs]
        if not self.can_replay:
            return None
        lines = [*self.lines, _Line([f"return [{', '.join(names)}]"], [name for name in names if name != "None"])]
        addressed = [[part.tensor for part in line.parts if isinstance(part, _Address)] for line in lines]
        last = {name: index for index, line in enumerate(lines) for name in (*line.tensors, *addressed[index])}
        blocks = {name: _Address(name) for name in last} | self._share_memory(last)
        body: list[str] = []
        with_pointers: set[str] = set()
        for index, line in enumerate(lines):
            pointers = dict.fromkeys(blocks[name].tensor for name in addressed[index])
            used = dict.fromkeys((*line.tensors, *pointers))
            body += [f"{name} = {self.allocations.pop(name).code}" for name in used if name in self.allocations]
            body += [f"{name}_ptr = {name}.data_ptr()" for name in pointers if name not in with_pointers]
            with_pointers.update(pointers)
            body.append("".join([part if isinstance(part, str) else part.render(blocks) for part in line.parts]))
            # Later allocations may use the memory.
            dead = [name for name in used if last[name] == index < len(lines) - 1]
            body += [f"del {', '.join(dead)}"] if dead else []
        return self._compile(body)

    def _share_memory(self, last: dict[str, int]) -> dict[str, _Address]:
        """Replace allocations that only launches use by shared ones; return where each begins in these.

        Args:
            last: the last line that uses each tensor; it gets the last lines of shared allocations.
        """
        blocks: dict[str, _Address] = {}
        scratch = [name for name in self.allocations if name in last and name not in self.used_tensors]
        freed = {name: last[name] for name in scratch}
        small = [name for name in scratch if self.allocations[name].num_bytes <= _SMALL]
        if sum(self.allocations[name].num_bytes for name in small) <= _MAX_SMALL:
            freed |= dict.fromkeys(small, max([last[name] for name in small], default=0))
        for index in sorted(set(freed.values())):
            parts, block = [name for name in scratch if freed[name] == index], f"scratch{index}"
            # As torch does, begin at multiples of 512 bytes.
            *starts, size = accumulate((-(-self.allocations[name].num_bytes // 512) * 512 for name in parts), initial=0)
            blocks |= {name: _Address(block, start) for name, start in zip(parts, starts, strict=True)}
            self.allocations[block] = _Allocation(f"empty(({size},), (1,), dtype=uint8, device=device)", size)
            last[block] = index
        return blocks

    def _compile(self, body: Sequence[str]) -> Replay:
        """Return a replay function with these lines."""
        from triton import knobs
        from triton.runtime import driver

        inputs, index = ", ".join(self.inputs), self.constants["device"].index or 0

        def is_profiled() -> bool:
            # A hook is None, a function, or a chain of functions.
            hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
            return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)

        self.constants |= {
            "is_profiled": is_profiled,
            "get_device": driver.active.get_current_device,
            "get_stream": driver.active.get_current_stream,
            "on_device": torch.cuda.device,
            "uint8": torch.uint8,
            "without_autocast": without_autocast,
        }
        head = [
            f"def replay({inputs}):",
            "if is_profiled(): return None",
            # Launches go to the current device.
            f"if get_device() != {index}:",
            f"    with on_device({index}): return replay({inputs})",
            f"stream = get_stream({index})",
        ]
        if self.has_operations:
            body = ["with without_autocast(device):", *[f"    {line}" for line in body]]
        source = "\n    ".join([*head, *body])
        _logger.debug("%s", source)
        exec(source, self.constants)
        return self.constants["replay"]

    def _add_tensor(self, tensor: Tensor) -> str:
        self.live_tensors.append(tensor)
        return self.names.setdefault(id(tensor), f"t{len(self.names)}")

    def _name(self, tensor: Tensor) -> str:
        """Return the name of a tensor; "" if it is neither an input nor was made here."""
        return self.names.get(id(tensor), "")

    def _address(self, tensor: Tensor) -> _Address:
        return self.addresses.get(self._name(tensor), _Address(self._name(tensor)))

    def _use(self, name: str) -> str:
        """Return the name of a tensor, after adding the line of its view if there is none yet."""
        self.can_replay &= name != ""
        self.used_tensors.add(name)
        if (view := self.views.pop(name, None)) is not None:
            for base in view.tensors:
                self._use(base)
            self.lines.append(view)
        return name

    def _add_constant(self, name: str, value: object) -> str:
        """Return the name of an object in the function's globals: this, with a number if another object has it."""
        unique = name
        while self.constants.setdefault(unique, value) is not value:
            unique = f"{name}_{len(self.constants)}"
        return unique

    def _render_call(self, operation: object, args: Any, kwargs: dict[str, Any]) -> str:
        arguments = [*map(self._render, args), *(f"{name}={self._render(value)}" for name, value in kwargs.items())]
        return f"{self._add_constant(str(operation).replace('.', '_'), operation)}({', '.join(arguments)})"

    def _render(self, value: object) -> str:
        """Return an argument of an operation in Python. Inf, nan, and objects such as dtypes have no literal."""
        if isinstance(value, Tensor):
            return self._name(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._render, value))}]"
        is_literal = value is None or type(value) in (bool, int)
        return repr(value) if is_literal else self._add_constant(type(value).__name__, value)


@lru_cache(1024)
def _find_launcher(types: tuple[str, ...], compiled: CompiledKernel) -> Callable[..., None]:
    """Return Triton's launcher of a compiled kernel for a flat list of parameters, without constants."""
    from triton.runtime import driver

    source = SimpleNamespace(constants={}, signature=dict(enumerate(types)), fn=compiled.src.fn)
    return driver.active.launcher_cls(source, compiled.metadata)
