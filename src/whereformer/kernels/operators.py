"""Backends as operators of torch, the one derivative that all of them share, and plans for calls of one kind.

Autograd, the compiler, transforms and modes see one operator for a forward and one for its backward. Where nothing but
autograd is between a call and its numbers, the functions behind the operators are called instead: torch's dispatcher
takes longer than a short call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .call import ARGUMENTS, AXES, GRADIENTS, Call, CallTemplate, LogSums
from .kinds import FirstCall
from .memory import Memory
from .precision import without_autocast
from .torch_private import apply_without_transforms, below_autograd
from .tracing import is_eager, layouts_of

Results: TypeAlias = tuple[Tensor, Tensor, LogSums | None]
"""The output, what is kept for the backward, and ``LogSums``, which are None if a call does not want them."""

Again: TypeAlias = Callable[..., Any] | None
"""A function that computes the same for other tensors of the same dtypes, sizes, strides and alignment. It returns None
where it must not be used now."""


class Given(NamedTuple):
    """What a backward gets besides its call.

    Args:
        d_output: the output's gradient, like the output.
        d_lse: that of the logs of sums, (batch, heads, n_q); None where nothing used them.
        output, kept: what the forward returned.
    """

    d_output: Tensor
    d_lse: Tensor | None
    output: Tensor
    kept: Tensor


class Backend:
    """How calls are computed."""

    name: str
    inputs: tuple[str, ...] = GRADIENTS
    """Those of ``GRADIENTS`` that it knows; calls with others are refused."""

    def why_not(self, call: Call, device: torch.device) -> str | None:
        """Return why it cannot take calls of the inputs that it knows on that device; None if it can."""
        return None

    def adapted(self, call: Call) -> Call:
        """Return the same call as the backend takes it; differentiable."""
        return call

    def new_kept(self, call: Call) -> Tensor:
        """Allocate what the forward keeps."""
        raise NotImplementedError

    def forward(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Results, Again]:
        """Compute a call, and return a function that does it again with other ``tensors``, if there is one.

        Args:
            tensors: the call's, in the order of ``AXES``.
        """
        raise NotImplementedError

    def backward(
        self, call: Call, given: Given, needed: Sequence[str], tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Again]:
        """Return gradients, and a function that computes them again with other ``tensors``, if there is one.

        Args:
            needed: their names, some of ``GRADIENTS`` in their order.
            tensors: the call's, and then those of ``given``.
        """
        raise NotImplementedError


class Plan(CallTemplate):
    """How a backend computes all calls that differ in their tensors alone."""

    def __init__(self, call: Call, backend: Backend) -> None:
        super().__init__(call)
        self.backend = backend
        self._forward: Again = None
        self._backwards = Memory(8)
        self._saved: list[tuple[Any, ...]] = []  # of all tensors that a forward saves: the dtype, shape and device

    def attend(self, tensors: Sequence[Tensor]) -> tuple[Tensor, LogSums | None]:
        if torch.is_grad_enabled():
            found = _attend(self, *tensors)
            return found if self.template.wants_lse else (found, None)
        output, _, lse = self.forward(tensors)
        return output, lse

    def forward(self, tensors: Sequence[Tensor]) -> Results:
        found: Results | None = None if self._forward is None else self._forward(*tensors)
        if found is None:
            tensors = _apart(tensors)
            found, self._forward = self.backend.forward(self.with_tensors(tensors), tensors)
            self._saved = [_sort_of(tensor) for tensor in (*tensors, *found[:2])]
        return found

    def backward(self, tensors: Sequence[Tensor], needs: Sequence[bool], given: Given) -> list[Tensor]:
        """Return the gradients of tensors that need one."""
        whole = [*tensors, *(tensor for tensor in given if tensor is not None)]
        # Hooks on saved tensors may bring them back with other strides, or elsewhere, and so may a new ``tensor.data``.
        layouts = layouts_of(whole)
        if layouts is None:  # the dispatcher gives the operator tensors whose memory has their numbers
            return _Dispatched(self.with_tensors(tensors), _operators[self.backend.name]).backward(
                tensors, needs, given
            )
        key = (*needs, layouts, torch.are_deterministic_algorithms_enabled())
        again = self._backwards.values.get(key)
        found: list[Tensor] | None = None if again is None else again(*whole)
        if found is None:
            self._check_saved([*tensors, given.output, given.kept])
            needed = [name for name, need in zip(self.names, needs, strict=True) if need]
            whole = _apart(whole)
            d_output, *d_lse, output, kept = whole[len(needs) :]
            given = Given(d_output, d_lse[0] if d_lse else None, output, kept)
            found, again = self.backend.backward(self.with_tensors(whole[: len(needs)]), given, needed, whole)
            if again is not None:
                self._backwards.put(key, again)
        return found

    def _check_saved(self, tensors: Sequence[Tensor]) -> None:
        """Raise if a saved tensor came back as another sort of tensor: kernels would read beyond its memory."""
        for name, tensor, expected in zip((*self.names, "output", "state"), tensors, self._saved, strict=False):
            if (sort := _sort_of(tensor)) != expected:
                raise RuntimeError(f"attention: expected the saved {name} as {_text(expected)}, got {_text(sort)}")


def _sort_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.device


def _text(sort: tuple[Any, ...]) -> str:
    return "{} of shape {} on {}".format(*sort)


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return an object for each tensor, also where two are one, so that a backend can tell which of them it reads."""
    return [tensor.detach() for tensor in tensors]


class _Dispatched(Plan):
    """Computes calls of a kind by a backend's operators."""

    def __init__(self, call: Call, operators: Operators) -> None:
        super().__init__(call, operators.backend)
        self._operators = operators

    def forward(self, tensors: Sequence[Tensor]) -> Results:
        with below_autograd():
            results: Results = self._operators.forward(*self.with_tensors(tensors).arguments())
        return results

    def backward(self, tensors: Sequence[Tensor], needs: Sequence[bool], given: Given) -> list[Tensor]:
        needed = {name for name, need in zip(self.names, needs, strict=True) if need}
        flags = [name in needed for name in GRADIENTS]
        gradients: list[Tensor] = self._operators.backward(*given, flags, *self.with_tensors(tensors).arguments())
        return gradients


class _Attend(torch.autograd.Function):
    """Attention by a plan."""

    # With a separate setup_context, torch would look up the signature in every call.
    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> Any:
        output, kept, lse = plan.forward(tensors)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, output, kept)
        ctx.set_materialize_grads(False)
        if isinstance(plan, _Dispatched):
            return output, kept, lse
        return output if lse is None else (output, lse)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor | None, *others: Tensor | None) -> Any:
        plan, (*tensors, output, kept), needs = ctx.plan, ctx.saved_tensors, ctx.needs_input_grad[1:]
        # A compiled program has a gradient for every output, also for an empty one.
        d_lse = others[-1][1] if plan.template.wants_lse and others[-1] is not None else None
        if (d_output is None and d_lse is None) or not any(needs):
            return None, *[None] * len(needs)
        if d_output is None:
            d_output = torch.zeros_like(output)
        if torch.is_grad_enabled() or not is_eager(d_output):
            # A gradient that is to have a gradient itself needs the operator, and so does one that something watches.
            plan = _Dispatched(plan.with_tensors(tensors), _operators[plan.backend.name])
        gradients = iter(plan.backward(tensors, needs, Given(d_output, d_lse, output, kept)))
        return None, *[next(gradients) if need else None for need in needs]


_attend = apply_without_transforms(_Attend)
"""Plans run where no transform is."""


def _no_second_derivative(*_: Any) -> None:
    raise NotImplementedError("backend: only 'reference' has second derivatives; use backend='reference'")


_library = torch.library.Library("whereformer", "FRAGMENT")

_operators: dict[str, Operators] = {}
"""Those of each backend, by its name."""


class Operators:
    """The operators of a backend, ``whereformer::NAME_forward`` and ``whereformer::NAME_backward``."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.plans = Memory(256)
        given = "Tensor d_output, Tensor? d_lse, Tensor output, Tensor kept, bool[] needed"
        self.forward = _define(
            f"{backend.name}_forward",
            f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
            self._run_forward,
            self._fake_forward,
        )
        self.backward = _define(
            f"{backend.name}_backward", f"({given}, {ARGUMENTS}) -> Tensor[]", self._run_backward, self._fake_backward
        )
        _library.impl(f"{backend.name}_forward", self._differentiable, "Autograd")
        torch.library.register_autograd(f"whereformer::{backend.name}_backward", _no_second_derivative, lib=_library)
        _operators[backend.name] = self

    def attend(self, call: Call, first: FirstCall | None = None) -> tuple[Tensor, LogSums | None]:
        """Compute a call, which is remembered if it is the ``first`` of a kind."""
        with without_autocast(call.value.device):
            with first or nullcontext():
                call = self.backend.adapted(call)
            eager = first is not None or is_eager(*[getattr(call, name) for name in GRADIENTS])
            plan, tensors = self.plan_of(call) if eager and call.value.device.type != "meta" else (None, [])
            if plan is not None:
                if first is not None:
                    first.remember(plan, tensors)
                return plan.attend(tensors)
            output, _, lse = self.forward(*call.arguments())
        return output, lse if call.wants_lse else None

    def plan_of(self, call: Call) -> tuple[Plan | None, list[Tensor]]:
        """Return the plan of a call, if its tensors' memory has their numbers, and its tensors in its order."""
        arguments = call.arguments()
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        layouts = layouts_of(tensors)
        if layouts is None:
            return None, tensors
        present = tuple([isinstance(each, Tensor) for each in arguments[: len(AXES)]])
        key = (
            layouts,
            present,
            *(tuple(each) if isinstance(each, Sequence) else each for each in arguments[len(AXES) :]),
        )
        plan: Plan | None = self.plans.values.get(key)
        if plan is None:
            plan = Plan(call, self.backend)
            self.plans.put(key, plan)
        return plan, tensors

    def _differentiable(self, *arguments: Any) -> Results:
        call = Call(*arguments)
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        results: Results = _Attend.apply(_Dispatched(call, self), *tensors)  # type: ignore[no-untyped-call]
        return results

    def _run_forward(self, *arguments: Any) -> Results:
        call = Call(*arguments)
        plan, tensors = self.plan_of(call)
        assert plan is not None  # the dispatcher has seen to that
        output, kept, lse = plan.forward(tensors)
        return output, kept, call.new_lse() if lse is None else lse

    def _fake_forward(self, *arguments: Any) -> Results:
        call = Call(*arguments)
        return call.new_output(), self.backend.new_kept(call), call.new_lse()

    def _run_backward(
        self,
        d_output: Tensor,
        d_lse: Tensor | None,
        output: Tensor,
        kept: Tensor,
        needed: Sequence[bool],
        *arguments: Any,
    ) -> list[Tensor]:
        plan, tensors = self.plan_of(Call(*arguments))
        assert plan is not None
        wanted = dict(zip(GRADIENTS, needed, strict=True))
        needs = [wanted.get(name, False) for name in plan.names]
        return plan.backward(tensors, needs, Given(d_output, d_lse, output, kept))

    def _fake_backward(
        self, d_output: Any, d_lse: Any, output: Any, kept: Any, needed: Sequence[bool], *arguments: Any
    ) -> list[Tensor]:
        call = Call(*arguments)
        return [call.new_gradient(name) for name, need in zip(GRADIENTS, needed, strict=True) if need]


def _define(name: str, schema: str, function: Any, fake: Any) -> Any:
    """Define an operator that runs on any device, and return it."""
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"whereformer::{name}", fake, lib=_library)
    return getattr(torch.ops.whereformer, name).default
