"""Plans: what a kind of call does on the device, written down as a Python function that is run for calls like it.

To describe a call to the kernels takes many times as long as to start them. All of it follows from the dtypes, sizes
and strides of tensors, and from numbers. So the first call of a kind runs under a :class:`_Recorder`, which sees every
torch operation and every launch and writes them as lines of Python: allocations, operations, and launches whose
parameters are numbers but for the addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..precision import without_autocast
from ..torch_private import DispatchMode, leaves
from .available import interpreted

_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)

_ALLOCATIONS = frozenset({"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "empty_permuted"})


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch a kernel."""
    compiled = kernel[(programs,)](*arguments, **options)
    recorder = _recorder.get()
    if recorder is not None:
        recorder.add_launch(compiled, programs, dict(zip(kernel.arg_names, arguments, strict=False)))


def record(
    compute: Callable[[], Sequence[Tensor | None]], inputs: Sequence[Tensor]
) -> tuple[Sequence[Tensor | None], Callable[..., Any] | None]:
    """Return what ``compute`` returns, and a function of the inputs that does the same, if it can be recorded.

    The function returns None where it must not be used: where a profiler has hooks in Triton's launches.
    """
    if interpreted():
        return compute(), None
    recorder = _Recorder(inputs)
    token = _recorder.set(recorder)
    try:
        with recorder:
            outputs = compute()
    finally:
        _recorder.reset(token)
    return outputs, recorder.function(outputs)


@dataclass
class _Line:
    """A line of the function.

    Args:
        makes: the name of the tensor that it makes, without which it is not needed; None if it writes to memory.
        uses: the names of the tensors that it uses.
        launches: whether it uses their addresses.
    """

    text: str
    makes: str | None
    uses: list[str]
    launches: bool = False


class _Recorder(DispatchMode):
    """Writes down torch operations and launches.

    Args:
        inputs: the tensors that are given; all others have to be made while it records.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[int, str] = {}
        self.kept: list[Tensor] = []  # an id is unique while its object lives
        self.bases: dict[str, tuple[str, int]] = {}  # of views: what they are a view of, and how far from its beginning
        self.lines: list[_Line] = []
        self.values: dict[str, Any] = {"empty": torch.empty_strided}
        self.works, self.computes = True, False
        self.device = inputs[0].device
        self.inputs = [self._new_name(tensor) for tensor in inputs]

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = operation(*args, **(kwargs or {}))
        kind = operation.overloadpacket.__name__
        found = [each for each in leaves(results) if isinstance(each, Tensor)]
        given = [each for each in leaves((args, kwargs)) if isinstance(each, Tensor)]
        if kind in ("detach", "alias"):
            self.kept.append(found[0])
            self.names[id(found[0])] = self._name_of(given[0])
        elif kind in _ALLOCATIONS:
            (made,) = found
            name, dtype, device = self._new_name(made), self._value(made.dtype), self._value(made.device)
            size, strides = tuple(made.shape), made.stride()
            self.lines.append(_Line(f"{name} = empty({size}, {strides}, dtype={dtype}, device={device})", name, []))
        elif found:
            self._add_operation(operation, args, kwargs or {}, results, found, given)
        else:
            # It read a number, on which what follows may depend.
            self.works = False
        return results

    def _add_operation(
        self, operation: Any, args: Any, kwargs: Any, results: Any, found: list[Tensor], given: list[Tensor]
    ) -> None:
        uses = [self._name_of(each) for each in given]
        call = f"{self._value(operation)}({self._text_of(args, kwargs)})"
        if operation.is_view:
            for index, view in enumerate(found):
                name = self._new_name(view)
                root, start = self.bases.get(uses[0], (uses[0], 0))
                self.bases[name] = root, start + view.data_ptr() - given[0].data_ptr()
                item = f"[{index}]" if isinstance(results, tuple | list) else ""
                self.lines.append(_Line(f"{name} = {call}{item}", name, uses))
            return
        self.computes = True
        new = [each for each in found if id(each) not in self.names]
        if len(new) == len(found) == 1:
            name = self._new_name(new[0])
            self.lines.append(_Line(f"{name} = {call}", name, uses))
        else:
            made = "".join(f"{self._new_name(each)}, " for each in new)
            self.works = self.works and len(new) in (0, len(found))
            self.lines.append(_Line(f"{made}= {call}" if made else call, None, uses))

    def add_launch(self, compiled: Any, programs: int, arguments: dict[str, Any]) -> None:
        """Write down a launch of a compiled kernel."""
        values: list[str] = []
        kinds: list[str] = []
        uses: list[str] = []

        def flatten(value: Any, kind: Any) -> None:
            if isinstance(kind, tuple):
                for each, of_each in zip(value, kind, strict=True):
                    flatten(each, of_each)
            elif kind != "constexpr":
                kinds.append(kind)
                if isinstance(value, Tensor):
                    name = self._name_of(value)
                    root, start = self.bases.get(name, (name, 0))
                    uses.append(root)
                    values.append(f"{root}_ + {start}" if start else f"{root}_")
                else:
                    values.append(repr(value))

        for name, kind in compiled.src.signature.items():
            flatten(arguments.get(name), kind)
        function, metadata = self._value(compiled.function), self._value(compiled.packed_metadata)
        run = self._value(_launcher(tuple(kinds), compiled))
        text = f"{run}({programs}, 1, 1, stream, {function}, {metadata}, None, None, None, {', '.join(values)})"
        self.lines.append(_Line(text, None, uses, launches=True))

    def function(self, outputs: Sequence[Tensor | None]) -> Callable[..., Any] | None:
        """Return what was recorded as a function of the inputs that returns the outputs."""
        results = ["None" if each is None else self._name_of(each) for each in outputs]
        if not self.works:
            return None
        needed, addressed = set(results), set()
        lines: list[_Line] = []
        for line in reversed(self.lines):
            if line.makes is None or line.makes in needed:
                needed.update(line.uses)
                lines.append(line)
                if line.launches:
                    addressed.update(line.uses)
        last: dict[str, _Line] = {}  # the last line that uses a tensor
        for line in lines:
            for name in line.uses:
                last.setdefault(name, line)
        body = [f"{name}_ = {name}.data_ptr()" for name in self.inputs if name in addressed]
        for line in reversed(lines):
            body.append(line.text)
            if line.makes in addressed:
                body.append(f"{line.makes}_ = {line.makes}.data_ptr()")
            done = [name for name in dict.fromkeys(line.uses) if last[name] is line and name not in results]
            if done:
                # Its memory is free for what comes after.
                body.append(f"del {', '.join(done)}")
        return self._compiled(body, results)

    def _compiled(self, body: list[str], results: list[str]) -> Callable[..., Any]:
        from triton import knobs
        from triton.runtime import driver

        index, inputs = self.device.index or 0, ", ".join(self.inputs)
        self.values |= {
            "hooks": (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook),
            "current_device": driver.active.get_current_device,
            "current_stream": driver.active.get_current_stream,
            "on": torch.cuda.device,
        }
        head = [
            f"def plan({inputs}):",
            "if hooks[0].calls or hooks[1].calls: return None",
            # Launches go to the current device.
            f"if current_device() != {index}:",
            f"    with on({index}): return plan({inputs})",
            f"stream = current_stream({index})",
        ]
        exec("\n    ".join([*head, *body, f"return {', '.join(results)},"]), self.values)
        plan: Callable[..., Any] = self.values["plan"]
        if not self.computes:
            return plan
        device = self.device

        def plan_without_autocast(*tensors: Tensor) -> Any:
            with without_autocast(device):
                return plan(*tensors)

        return plan_without_autocast

    def _new_name(self, tensor: Tensor) -> str:
        self.kept.append(tensor)
        return self.names.setdefault(id(tensor), f"t{len(self.names)}")

    def _name_of(self, tensor: Tensor) -> str:
        name = self.names.get(id(tensor))
        if name is None:
            # It is no input, and was not made here.
            self.works = False
            return "unknown"
        return name

    def _value(self, value: Any) -> str:
        """Return the name of an object of the function's globals."""
        name = f"c{len(self.values)}"
        for known, other in self.values.items():
            if other is value or (isinstance(value, torch.device) and type(other) is torch.device and other == value):
                return known
        self.values[name] = value
        return name

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._name_of(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._text, value))}]"
        return repr(value) if value is None or type(value) in (bool, int) else self._value(value)

    def _text_of(self, args: Any, kwargs: dict[str, Any]) -> str:
        return ", ".join([*map(self._text, args), *(f"{name}={self._text(each)}" for name, each in kwargs.items())])


def _launcher(kinds: tuple[str, ...], compiled: Any) -> Any:
    """Return Triton's launcher of a compiled kernel for a flat list of parameters, without constants."""
    from triton.runtime import driver

    launcher = _launchers.get(compiled)
    if launcher is None:
        source = SimpleNamespace(constants={}, signature=dict(enumerate(kinds)), fn=compiled.src.fn)
        launcher = _launchers[compiled] = driver.active.launcher_cls(source, compiled.metadata)
    return launcher


_launchers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
