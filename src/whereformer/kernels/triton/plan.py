"""Plans: what a kind of call does on the device, written down as a Python function that is run for calls like it.

To describe a call to the kernels takes many times as long as to start them. All of it follows from the dtypes, sizes
and strides of tensors, and from numbers. So the first call of a kind runs under a :class:`_Recorder`, which sees every
torch operation and every launch and writes them as lines of Python: allocations, operations, and launches whose
parameters are numbers but for the addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import lru_cache
from itertools import accumulate, chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..precision import without_autocast
from ..torch_private import DispatchMode, flatten_tree
from .available import is_interpreted

_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)

_SMALL, _MOST_SMALL = 2**20, 2**23
"""Bytes that may be free a little later: of one allocation, and of all together."""

_ALLOCATIONS = frozenset({"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "empty_permuted"})


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch a kernel, compiled with sums of products fused, whatever a version of Triton does by default."""
    compiled = kernel[(programs,)](*arguments, enable_fp_fusion=True, **options)
    if (recorder := _recorder.get()) is not None:
        recorder.add_launch(compiled, programs, dict(zip(kernel.arg_names, arguments, strict=False)))


def record(
    compute: Callable[[], Sequence[Tensor | None]], inputs: Sequence[Tensor]
) -> tuple[Any, Callable[..., Any] | None]:
    """Return what ``compute`` returns, and a function of the inputs that does the same; None if there is no such.

    There is none if what is computed depends on numbers in tensors. The function returns None where it must not be
    used: where a profiler has hooks in Triton's launches.

    Args:
        inputs: an object for each, also where two are one tensor, so that others may be two.
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
        return outputs, recorder.function(outputs)


class _Recorder(DispatchMode):
    """Writes torch operations and launches down as lines, each with the names of the tensors that it uses, and of those
    of which it uses only where they begin.

    An allocation or a view is written where it is first used. Where only launches use allocations, those that are freed
    at the same line are one, and so are all small ones.

    Args:
        inputs: the tensors that are given; all others have to be made while it records.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[int, str] = {}
        self.kept: list[Tensor] = []  # an id is unique while its object lives
        self.bases: dict[str, tuple[str, int]] = {}  # of views: what they are a view of, and how far from its beginning
        self.views: dict[str, tuple[str, list[Tensor]]] = {}  # that are not written yet
        self.allocations: dict[str, tuple[str, int]] = {}  # how each is written, and its bytes
        self.used: set[str] = set()  # by more than a launch
        self.lines: list[tuple[str, list[str], list[str]]] = []
        self.values: dict[str, Any] = {"empty": torch.empty_strided, "uint8": torch.uint8, "device": inputs[0].device}
        self.works, self.computes = True, False
        self.inputs = [self._new(tensor) for tensor in inputs]

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = operation(*args, **kwargs)
        found = [each for each in flatten_tree(results) if isinstance(each, Tensor)]
        given = [each for each in flatten_tree((args, kwargs)) if isinstance(each, Tensor)]
        new = [each for each in found if id(each) not in self.names]
        if operation.overloadpacket.__name__ in ("detach", "alias"):
            self.kept.append(found[0])
            self.names[id(found[0])] = self.names.get(id(given[0]), "")
        elif operation.overloadpacket.__name__ in _ALLOCATIONS:
            (made,) = found
            text = f"empty({tuple(made.shape)}, {made.stride()}, dtype={self._value(made.dtype)}, device=device)"
            self.allocations[self._new(made)] = text, made.untyped_storage().nbytes()
        elif operation.is_view:
            base = self.names.get(id(given[0]), "")
            root, start = self.bases.get(base, (base, 0))
            call = self._call(operation, args, kwargs)
            for index, view in enumerate(found):
                name = self._new(view)
                self.bases[name] = root, start + view.data_ptr() - given[0].data_ptr()
                self.views[name] = f"{call}[{index}]" if isinstance(results, tuple | list) else call, given
        elif not found and not given:
            pass  # such as the common type of two dtypes
        elif not found or len(new) not in (0, len(found)):
            # It read a number, on which what follows may depend, or is of an unknown kind.
            self.works = False
        else:
            self.computes = True
            uses, call = [self._use(each) for each in given], self._call(operation, args, kwargs)
            names = [self._new(each) for each in new]
            comma = "," * isinstance(results, tuple | list)
            self.lines.append((f"{', '.join(names)}{comma} = {call}" if names else call, uses, []))
        return results

    def add_launch(self, compiled: Any, programs: int, arguments: dict[str, Any]) -> None:
        """Write down a launch of a compiled kernel."""
        values: list[str] = []
        kinds: list[str] = []
        addresses: list[str] = []

        def flatten(value: Any, kind: Any) -> None:
            if isinstance(kind, tuple):
                for each, of_each in zip(value, kind, strict=True):
                    flatten(each, of_each)
            elif kind != "constexpr":
                kinds.append(kind)
                text = repr(value)
                if isinstance(value, Tensor):
                    name = self.names.get(id(value), "")
                    root, start = self.bases.get(name, (name, 0))
                    addresses.append(self._known(root))
                    text = f"{{{root}}} + {start}" if start else f"{{{root}}}"
                values.append(text)

        for name, kind in compiled.src.signature.items():
            flatten(arguments.get(name), kind)
        function, metadata = self._value(compiled.function), self._value(compiled.packed_metadata)
        run = self._value(_launcher(tuple(kinds), compiled))
        text = f"{run}({programs}, 1, 1, stream, {function}, {metadata}, None, None, None, {', '.join(values)})"
        self.lines.append((text, [], addresses))

    def function(self, outputs: Sequence[Tensor | None]) -> Callable[..., Any] | None:
        """Return what was recorded as a function of the inputs that returns the outputs."""
        results = ["None" if each is None else self._use(each) for each in outputs]
        if not self.works:
            return None
        lines = [*self.lines, (f"return [{', '.join(results)}]", results, [])]
        last = {name: index for index, (_, *names) in enumerate(lines) for name in chain(*names)}
        places = {name: (name, 0) for name in last}  # of whose memory a tensor is a part, and where it begins there
        scratch = [name for name in self.allocations if name in last and name not in self.used]
        freed = {name: last[name] for name in scratch}
        small = [name for name in scratch if self.allocations[name][1] <= _SMALL]
        if sum(self.allocations[name][1] for name in small) <= _MOST_SMALL:
            freed |= dict.fromkeys(small, max([last[name] for name in small], default=0))
        for index in sorted(set(freed.values())):
            parts = [name for name in scratch if freed[name] == index]
            # As torch does, begin at multiples of 512 bytes.
            *starts, size = accumulate((-(-self.allocations[name][1] // 512) * 512 for name in parts), initial=0)
            places |= {name: (f"m{index}", start) for name, start in zip(parts, starts, strict=True)}
            self.allocations[f"m{index}"] = f"empty(({size},), (1,), dtype=uint8, device=device)", size
            last[f"m{index}"] = index
        texts = {name: f"{whole}_ + {start}" if start else f"{whole}_" for name, (whole, start) in places.items()}
        body: list[str] = []
        addressed: set[str] = set()
        for index, (text, uses, addresses) in enumerate(lines):
            wholes = [places[name][0] for name in addresses]
            names = dict.fromkeys((*uses, *wholes))
            body += [f"{name} = {self.allocations.pop(name)[0]}" for name in names if name in self.allocations]
            body += [f"{name}_ = {name}.data_ptr()" for name in dict.fromkeys(wholes) if name not in addressed]
            addressed.update(wholes)
            body.append(text.format_map(texts))
            # The memory is free for what comes after.
            body += [f"del {name}" for name in names if last[name] == index < len(lines) - 1]
        return self._compiled(body)

    def _compiled(self, body: list[str]) -> Callable[..., Any]:
        from triton import knobs
        from triton.runtime import driver

        inputs, device = ", ".join(self.inputs), self.values["device"]
        index = device.index or 0
        self.values |= {
            "watched": lambda: _watches(knobs.runtime.launch_enter_hook) or _watches(knobs.runtime.launch_exit_hook),
            "current_device": driver.active.get_current_device,
            "current_stream": driver.active.get_current_stream,
            "on": torch.cuda.device,
        }
        head = [
            f"def plan({inputs}):",
            "if watched(): return None",
            # Launches go to the current device.
            f"if current_device() != {index}:",
            f"    with on({index}): return plan({inputs})",
            f"stream = current_stream({index})",
        ]
        exec("\n    ".join([*head, *body]), self.values)
        plan: Callable[..., Any] = self.values["plan"]
        if not self.computes:
            return plan

        def plan_without_autocast(*tensors: Tensor) -> Any:
            with without_autocast(device):
                return plan(*tensors)

        return plan_without_autocast

    def _new(self, tensor: Tensor) -> str:
        self.kept.append(tensor)
        return self.names.setdefault(id(tensor), f"t{len(self.names)}")

    def _use(self, tensor: Tensor) -> str:
        """Return the name of a tensor after writing the line that makes it, if it is a view that is not written yet."""
        name = self._known(self.names.get(id(tensor), ""))
        self.used.add(name)
        if name in self.views:
            text, given = self.views.pop(name)
            self.lines.append((f"{name} = {text}", [self._use(each) for each in given], []))
        return name

    def _known(self, name: str) -> str:
        if not name:
            # It is no input, and was not made here.
            self.works = False
        return name

    def _value(self, value: Any) -> str:
        """Return the name of an object of the function's globals."""
        name = f"c{len(self.values)}"
        self.values[name] = value
        return name

    def _call(self, operation: Any, args: Any, kwargs: dict[str, Any]) -> str:
        named = [f"{name}={self._text(each)}" for name, each in kwargs.items()]
        return f"{self._value(operation)}({', '.join([*map(self._text, args), *named])})"

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self.names.get(id(value), "")
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._text, value))}]"
        return repr(value) if value is None or type(value) in (bool, int) else self._value(value)


def _watches(hook: Any) -> bool:
    """Whether a launch hook of Triton does anything: it is None, a function, or a chain of functions."""
    return hook is not None and bool(getattr(hook, "calls", True))


@lru_cache(1024)
def _launcher(kinds: tuple[str, ...], compiled: Any) -> Any:
    """Return Triton's launcher of a compiled kernel for a flat list of parameters, without constants."""
    from triton.runtime import driver

    source = SimpleNamespace(constants={}, signature=dict(enumerate(kinds)), fn=compiled.src.fn)
    return driver.active.launcher_cls(source, compiled.metadata)
