"""Backends as operators of torch, the one autograd function that they share, and plans for repeated calls.

A backend computes the equation of kernels/call.py and its gradients. Autograd, the compiler, transforms and modes see
one operator for a forward and one for its backward. In eager code that only autograd watches, a :class:`Plan` calls
the backend itself, because torch's dispatcher takes longer than a short call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .bounded_cache import BoundedCache
from .call import ARGUMENTS, AXES, GRADIENTS, TABLES, Call, CallTemplate, LogSums
from .plan_cache import StepRecorder
from .precision import without_autocast
from .torch_private import apply_without_transforms, below_autograd
from .tracing import is_eager, tensor_layouts

ForwardOutputs: TypeAlias = tuple[Tensor, Tensor, LogSums | None]
"""The output, the buffer of the :class:`ForwardState`, and ``LogSums``; the last are None if the call needs none."""

Replay: TypeAlias = Callable[..., Any]
"""Computes a call like the recorded one, whose tensors have the same dtypes, sizes, strides and alignments. It returns
None where it cannot do that now, as under a profiler; then the backend computes the call again."""


class BackwardInputs(NamedTuple):
    """The tensors that a backward gets besides its call."""

    d_output: Tensor  # the gradient of the output, like the output
    d_lse: Tensor | None  # of the log-sum-exps, (batch, heads, n_q); None if the loss does not depend on them
    output: Tensor  # this and the next: the first two of the ForwardOutputs
    buffer: Tensor


class Backend:
    """A way to compute calls."""

    name: str
    supported_inputs: tuple[str, ...] = GRADIENTS
    """The inputs in ``GRADIENTS`` that the backend supports. It does not get calls with other inputs."""

    def unsupported_reason(self, call: Call, device: torch.device) -> str | None:
        """Return why the backend does not support a call of ``supported_inputs`` on that device; None if it does."""
        return None

    def adapt(self, call: Call) -> Call:
        """Return an equal call in the form that the backend computes: by default, with wide tables. Autograd
        differentiates this step."""
        return call.widen(TABLES)

    def new_buffer(self, call: Call) -> Tensor:
        """Allocate the buffer of the forward's state."""
        raise NotImplementedError

    def forward(self, call: Call, tensors: Sequence[Tensor]) -> tuple[ForwardOutputs, Replay | None]:
        """Compute a call; return its results, and a function that computes it again for other ``tensors``, if any.
        They are the call's, in the order of ``AXES``."""
        raise NotImplementedError

    def backward(
        self, call: Call, inputs: BackwardInputs, grad_names: Sequence[str], tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Replay | None]:
        """Return gradients, and a function that computes them again for other ``tensors``, if any.

        Args:
            grad_names: the inputs to differentiate by, a selection of ``GRADIENTS`` in their order.
            tensors: the call's tensors, and then the tensors of ``inputs``.
        """
        raise NotImplementedError


class Plan(CallTemplate):
    """Computes all calls that differ only in their tensors by one backend."""

    def __init__(self, call: Call, backend: Backend) -> None:
        super().__init__(call)
        self.backend = backend
        self._forward: Replay | None = None
        self._backwards = BoundedCache(8)
        # The dtype, shape and device of saved tensors; none without a forward.
        self._saved_layouts: list[tuple[object, ...]] = []

    def attend(self, tensors: Sequence[Tensor]) -> tuple[Tensor, LogSums | None]:
        if torch.is_grad_enabled():
            results = _apply_attend(self, *tensors)
            return results if self.template.wants_lse else (results, None)
        output, _, lse = self.forward(tensors)
        return output, lse

    def forward(self, tensors: Sequence[Tensor]) -> ForwardOutputs:
        results: ForwardOutputs | None = None if self._forward is None else self._forward(*tensors)
        if results is None:
            # New objects, so that a backend can distinguish arguments that are the same tensor; likewise below.
            tensors = [tensor.detach() for tensor in tensors]
            results, self._forward = self.backend.forward(self.with_tensors(tensors), tensors)
            self._saved_layouts = [_saved_layout(tensor) for tensor in (*tensors, *results[:2])]
        return results

    def backward(self, tensors: Sequence[Tensor], needs: Sequence[bool], inputs: BackwardInputs) -> list[Tensor]:
        """Return the gradients of tensors that need one."""
        all_tensors = [*tensors, *(tensor for tensor in inputs if tensor is not None)]
        # Hooks on saved tensors may bring them back with other strides, or elsewhere, and so may a new ``tensor.data``.
        layouts = tensor_layouts(all_tensors)
        if layouts is None:  # the dispatcher writes the numbers of such tensors into memory
            dispatched = _DispatchedPlan(self.with_tensors(tensors), _operators[self.backend.name])
            return dispatched.backward(tensors, needs, inputs)
        key = (*needs, layouts, torch.are_deterministic_algorithms_enabled())
        replay = self._backwards.values.get(key)
        gradients: list[Tensor] | None = None if replay is None else replay(*all_tensors)
        if gradients is None:
            self._check_saved([*tensors, inputs.output, inputs.buffer])
            grad_names = [name for name, need in zip(self.names, needs, strict=True) if need]
            all_tensors = [tensor.detach() for tensor in all_tensors]
            call = self.with_tensors(all_tensors[: len(needs)])
            d_output, *d_lse, output, buffer = all_tensors[len(needs) :]
            inputs = BackwardInputs(d_output, d_lse[0] if d_lse else None, output, buffer)
            gradients, replay = self.backend.backward(call, inputs, grad_names, all_tensors)
            if replay is not None:
                self._backwards.put(key, replay)
        return gradients

    def _check_saved(self, tensors: Sequence[Tensor]) -> None:
        """Raise if a saved tensor has another dtype, shape or device now: kernels would read beyond its memory."""
        for name, tensor, expected in zip((*self.names, "output", "state"), tensors, self._saved_layouts, strict=False):
            if (layout := _saved_layout(tensor)) != expected:
                expected_text, layout_text = ("{} of shape {} on {}".format(*values) for values in (expected, layout))
                raise RuntimeError(f"attention: expected the saved {name} as {expected_text}, got {layout_text}")


def _saved_layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.device


class _DispatchedPlan(Plan):
    """Computes calls by a backend's operators."""

    def __init__(self, call: Call, operators: Operators) -> None:
        super().__init__(call, operators.backend)
        self._operators = operators

    def forward(self, tensors: Sequence[Tensor]) -> ForwardOutputs:
        with below_autograd():
            results: ForwardOutputs = self._operators.forward(*self.with_tensors(tensors).arguments())
        return results

    def backward(self, tensors: Sequence[Tensor], needs: Sequence[bool], inputs: BackwardInputs) -> list[Tensor]:
        grad_names = {name for name, need in zip(self.names, needs, strict=True) if need}
        flags = [name in grad_names for name in GRADIENTS]
        gradients: list[Tensor] = self._operators.backward(*inputs, flags, *self.with_tensors(tensors).arguments())
        return gradients


class _Attend(torch.autograd.Function):
    """Attention by a plan."""

    # With a separate setup_context, torch would look up the signature in every call.
    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> Any:
        output, buffer, lse = plan.forward(tensors)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, output, buffer)
        ctx.set_materialize_grads(False)
        if isinstance(plan, _DispatchedPlan):
            return output, buffer, lse
        return output if lse is None else (output, lse)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor | None, *d_rest: Tensor | None) -> Any:
        plan, (*tensors, output, buffer), needs = ctx.plan, ctx.saved_tensors, ctx.needs_input_grad[1:]
        # A compiled program has a gradient for every output, also for an empty one.
        d_lse = d_rest[-1][1] if plan.template.wants_lse and d_rest[-1] is not None else None
        if (d_output is None and d_lse is None) or not any(needs):
            return None, *[None] * len(needs)
        if d_output is None:
            d_output = torch.zeros_like(output)
        if torch.is_grad_enabled() or not is_eager(d_output):
            # Second derivatives need the operator, and so do gradients that a mode or a transform watches.
            plan = _DispatchedPlan(plan.with_tensors(tensors), _operators[plan.backend.name])
        gradients = iter(plan.backward(tensors, needs, BackwardInputs(d_output, d_lse, output, buffer)))
        return None, *[next(gradients) if need else None for need in needs]


_apply_attend = apply_without_transforms(_Attend)
"""Applies the function without the checks for transforms; plans run only where there are none."""


def _no_second_derivative(*_: object) -> None:
    raise NotImplementedError("backend: only 'reference' has second derivatives; use backend='reference'")


_library = torch.library.Library("whereformer", "FRAGMENT")

_operators: dict[str, Operators] = {}
"""The operators of each backend, by its name."""


class Operators:
    """The operators of a backend, ``whereformer::NAME_forward`` and ``whereformer::NAME_backward``."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.plans = BoundedCache(256)  # by merged calls: signatures may share one, and the dispatcher's have none
        inputs = "Tensor d_output, Tensor? d_lse, Tensor output, Tensor buffer, bool[] needs"
        schemas = f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor)", f"({inputs}, {ARGUMENTS}) -> Tensor[]"
        forward, backward = f"{backend.name}_forward", f"{backend.name}_backward"
        self.forward = _define(forward, schemas[0], self._run_forward, self._fake_forward)
        self.backward = _define(backward, schemas[1], self._run_backward, self._fake_backward)
        _library.impl(forward, self._differentiable, "Autograd")
        torch.library.register_autograd(f"whereformer::{backward}", _no_second_derivative, lib=_library)
        _operators[backend.name] = self

    def attend(self, call: Call, recorder: StepRecorder | None = None) -> tuple[Tensor, LogSums | None]:
        """Compute a call; the ``recorder`` of the first call with a signature caches its plan."""
        with without_autocast(call.value.device):
            with recorder or nullcontext():
                call = self.backend.adapt(call)
            eager = recorder is not None or is_eager(*[getattr(call, name) for name in GRADIENTS])
            plan, tensors = self.get_plan(call) if eager and call.value.device.type != "meta" else (None, [])
            if plan is not None:
                if recorder is not None:
                    recorder.cache_plan(plan, tensors)
                return plan.attend(tensors)
            output, _, lse = self.forward(*call.arguments())
        return output, lse if call.wants_lse else None

    def get_plan(self, call: Call) -> tuple[Plan | None, list[Tensor]]:
        """Return the plan of a call, or None if its tensors' memory does not have their numbers; and its tensors."""
        arguments = call.arguments()
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        layouts = tensor_layouts(tensors)
        if layouts is None:
            return None, tensors
        has_tensor = tuple([isinstance(value, Tensor) for value in arguments[: len(AXES)]])
        numbers = [tuple(value) if isinstance(value, Sequence) else value for value in arguments[len(AXES) :]]
        key = (layouts, has_tensor, *numbers)
        plan: Plan | None = self.plans.values.get(key)
        if plan is None:
            plan = Plan(call, self.backend)
            self.plans.put(key, plan)
        return plan, tensors

    def _differentiable(self, *arguments: Any) -> ForwardOutputs:
        call = Call(*arguments)
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        results: ForwardOutputs = _Attend.apply(_DispatchedPlan(call, self), *tensors)  # type: ignore[no-untyped-call]
        return results

    def _run_forward(self, *arguments: Any) -> ForwardOutputs:
        call = Call(*arguments)
        plan, tensors = self.get_plan(call)
        assert plan is not None  # the dispatcher has written the numbers of all tensors into memory
        output, buffer, lse = plan.forward(tensors)
        return output, buffer, call.new_lse() if lse is None else lse

    def _fake_forward(self, *arguments: Any) -> ForwardOutputs:
        call = Call(*arguments)
        return call.new_output(), self.backend.new_buffer(call), call.new_lse()

    def _run_backward(self, *arguments: object) -> list[Tensor]:
        inputs, needs, call = _split_backward(arguments)
        plan, tensors = self.get_plan(call)
        assert plan is not None
        return plan.backward(tensors, [needs.get(name, False) for name in plan.names], inputs)

    def _fake_backward(self, *arguments: object) -> list[Tensor]:
        _, needs, call = _split_backward(arguments)
        return [call.new_gradient(name) for name, need in needs.items() if need]


def _split_backward(arguments: tuple[Any, ...]) -> tuple[BackwardInputs, dict[str, bool], Call]:
    """Return the arguments of a backward's operator as the forward's results, the needed gradients, and the call."""
    needs = dict(zip(GRADIENTS, arguments[4], strict=True))
    return BackwardInputs(*arguments[:4]), needs, Call(*arguments[5:])


def _define(name: str, schema: str, function: Callable[..., object], fake: Callable[..., object]) -> Any:
    """Define an operator that runs on any device, and return it."""
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"whereformer::{name}", fake, lib=_library)
    return getattr(torch.ops.whereformer, name).default
