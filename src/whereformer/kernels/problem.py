"""``Problem``: a call with merged terms as the tensors and numbers that the fast backends' operators take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .dropout import row_seeds
from .merge import merge
from .terms import Positions, PositionsLike
from .torch_private import intercepted
from .tracing import is_plain

LOG2E = math.log2(math.e)

ARGUMENTS = (
    "Tensor? query, Tensor? key, Tensor value, Tensor? bias, Tensor? key_table, Tensor? query_table, "
    "Tensor? value_table, Tensor? key_table_factors, Tensor? query_table_factors, Tensor? query_factors, "
    "Tensor? key_factors, Tensor? query_levels, Tensor? key_levels, Tensor? dense, Tensor? key_mask, "
    "Tensor? query_positions, Tensor? key_positions, Tensor? query_documents, Tensor? key_documents, Tensor? seed, "
    "SymInt n_q, SymInt[] first, SymInt[] affine, "
    "SymInt? min_offset, SymInt? max_offset, float scale, float? softcap, "
    "float dropout_p, bool wants_lse"
)
"""The fields of :class:`Problem` as the arguments of an operator, in torch's schema language."""

GRADIENTS = (
    *("query", "key", "value", "bias", "key_table", "query_table", "value_table"),
    *("key_table_factors", "query_table_factors", "query_factors", "key_factors", "query_levels", "key_levels"),
    "dense",
)
"""The names of the inputs that have gradients: the first fields of :class:`Problem`."""


@dataclass(frozen=True)
class Problem:
    """A call with merged terms; shapes are as in :class:`Call`, tables and factors as in ``merge``.

    Args:
        seed: the seed of dropout; None without dropout.
        bias, key_table, query_table, value_table: the tables of an ``OffsetBias`` (heads, T), ``OffsetKeys``,
            ``OffsetQueries`` and ``OffsetValues`` (heads or 1, T, dim). ``bias`` and ``dense`` are in natural units,
            not scaled; rows are in their own order.
        key_table_factors: what ``key_table`` meets, (1 or batch, heads, n_q, dim), not scaled; None for the query,
            scaled.
        query_table_factors: what ``query_table`` meets, (1 or batch, heads, n_k, dim), not scaled; None for the key,
            scaled.
        query_levels, key_levels: the levels of ``DistanceDecay`` terms, (1 or batch, heads, n, number of terms).
        first: the offsets of the first columns of ``bias``, ``key_table``, ``query_table`` and ``value_table``.
        affine: start and stride of the queries' positions, then of the keys'; unused for explicit positions.
        min_offset, max_offset: the offsets that causality and the window allow; None without a limit.
        wants_lse: whether ``LogSums`` are asked for.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    bias: Tensor | None
    key_table: Tensor | None
    query_table: Tensor | None
    value_table: Tensor | None
    key_table_factors: Tensor | None
    query_table_factors: Tensor | None
    query_factors: Tensor | None
    key_factors: Tensor | None
    query_levels: Tensor | None
    key_levels: Tensor | None
    dense: Tensor | None
    key_mask: Tensor | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    query_documents: Tensor | None
    key_documents: Tensor | None
    seed: Tensor | None
    n_q: int
    first: Sequence[int]
    affine: Sequence[int]
    min_offset: int | None
    max_offset: int | None
    scale: float
    softcap: float | None
    dropout_p: float
    wants_lse: bool

    @classmethod
    def of(cls, call: Call) -> Problem:
        """Build the problem of a call. Autocast must be off, or it would change the tables' dtype."""
        query_positions, key_positions = call.query_positions, call.key_positions
        min_offset, max_offset = call.offset_limits()
        affine = [
            number
            for at in (query_positions, key_positions)
            for number in ((at.start, at.stride) if isinstance(at, Positions) else (0, 1))
        ]
        return cls(
            query=call.query,
            key=call.key,
            value=call.value,
            **merge(call),
            key_mask=call.key_mask,
            query_positions=None if isinstance(query_positions, Positions) else query_positions,
            key_positions=None if isinstance(key_positions, Positions) else key_positions,
            query_documents=call.query_documents,
            key_documents=call.key_documents,
            seed=call.seed,
            n_q=call.n_q,
            affine=affine,
            min_offset=min_offset,
            max_offset=max_offset,
            scale=call.scale,
            softcap=call.softcap,
            dropout_p=call.dropout_p,
            wants_lse=call.return_lse,
        )

    def arguments(self) -> tuple[Any, ...]:
        """Return the fields in their order."""
        return tuple(getattr(self, name) for name in _FIELDS)

    @property
    def n_k(self) -> int:
        return self.value.shape[2]

    @property
    def heads(self) -> int:
        """The number of query heads; those of keys and values may be fewer, but divide it."""
        return self.value.shape[1] if self.query is None else self.query.shape[1]

    @property
    def limits_offsets(self) -> bool:
        """Whether causality or the window may forbid a pair."""
        return self.min_offset is not None or self.max_offset is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scores and sums."""
        return torch.promote_types(self.value.dtype, torch.float32)

    @cached_property
    def dropout_seeds(self) -> Tensor | None:
        """Return the dropout seed of every row of scores, (batch, heads, n_q)."""
        return None if self.seed is None else row_seeds(self.seed, self.value.shape[0], self.heads, self.n_q)

    def is_eager(self) -> bool:
        """Whether nothing but autograd would see the problem's operator: no compiler, transform, mode or subclass."""
        inputs = (getattr(self, name) for name in GRADIENTS)
        return (
            self.value.device.type != "meta"
            and all(tensor is None or is_plain(tensor) for tensor in inputs)
            # Compiled programs cannot ask this, and are no longer here.
            and not intercepted()
        )

    def positions(self) -> tuple[PositionsLike, PositionsLike]:
        """Return the positions of queries and of keys."""
        query_start, query_stride, key_start, key_stride = self.affine
        query, key = Positions(query_start, query_stride, self.n_q), Positions(key_start, key_stride, self.n_k)
        return (
            query if self.query_positions is None else self.query_positions,
            key if self.key_positions is None else self.key_positions,
        )

    def new_output(self) -> Tensor:
        """Allocate the output in the layout that suits the projection after it, and not as a view: autograd lets nobody
        change those of a function in place."""
        value, size = self.value, (self.value.shape[0], self.heads, self.n_q, self.value.shape[3])
        return torch.empty_permuted(size, (0, 2, 1, 3), dtype=value.dtype, device=value.device)

    def new_lse(self) -> Tensor:
        """Allocate a ``LogSums``; it is empty if not asked for."""
        size = (2, self.value.shape[0], self.heads, self.n_q) if self.wants_lse else (0,)
        return self.value.new_empty(size, dtype=self.dtype)

    def new_gradients(self, needed: Sequence[bool]) -> list[Tensor]:
        """Allocate the needed gradients of ``GRADIENTS``. Compilers count on layouts that follow from sizes alone."""
        return [
            self.new_query_gradient()
            if name == "query"
            else torch.empty_like(getattr(self, name), memory_format=torch.contiguous_format)
            for name, need in zip(GRADIENTS, needed, strict=True)
            if need
        ]

    def new_query_gradient(self) -> Tensor:
        """Allocate the query's gradient in the layout that suits the projection before it."""
        assert self.query is not None
        return torch.empty_permuted(self.query.shape, (0, 2, 1, 3), dtype=self.query.dtype, device=self.query.device)


_FIELDS = tuple(Problem.__dataclass_fields__)


def register_gradients(forward: Any, backward: Any, run_forward: Any = None, run_backward: Any = None) -> Any:
    """Make one operator the derivative of another, and return a function that computes what the first one does.

    Where nothing but autograd is between a call and its numbers, that function calls ``run_forward`` and
    ``run_backward``, which compute what the operators do: going through torch's dispatcher takes longer than a short
    call.

    ``forward(*arguments)`` returns the output, what the backward needs, and ``LogSums``; ``backward(output_gradient,
    lse_gradient, output, kept, needed, *arguments)`` returns the needed gradients of ``GRADIENTS``. The gradient of the
    logs of sums, (batch, heads, n_q), is None where nothing used them.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        tensors = [value if isinstance(value, Tensor) else None for value in inputs]
        ctx.save_for_backward(*tensors, *output[:2])
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.set_materialize_grads(False)

    def differentiate(
        ctx: Any,
        output_gradient: Tensor | None,
        _: Tensor | None,
        lse_gradient: Tensor | None,
        compute: Any = backward,
    ) -> tuple[Tensor | None, ...]:
        *tensors, output, kept = ctx.saved_tensors
        inputs = [other if tensor is None else tensor for tensor, other in zip(tensors, ctx.others, strict=True)]
        found: list[Tensor | None] = [None] * len(inputs)
        needed = list(ctx.needs_input_grad[: len(GRADIENTS)])
        if lse_gradient is not None:
            # A compiled program has a gradient for every output, also for an empty one.
            lse_gradient = lse_gradient[1] if Problem(*inputs).wants_lse else None
        if (output_gradient is None and lse_gradient is None) or not any(needed):
            return tuple(found)
        if output_gradient is None:
            output_gradient = torch.zeros_like(output)
        gradients = iter(compute(output_gradient, lse_gradient, output, kept, needed, *inputs))
        for index, need in enumerate(needed):
            if need:
                found[index] = next(gradients)
        return tuple(found)

    def differentiate_again(ctx: Any, *_: Any) -> None:
        raise NotImplementedError("backend: only 'reference' has second derivatives; use backend='reference'")

    forward.register_autograd(differentiate, setup_context=save)
    backward.register_autograd(differentiate_again)

    class Eager(torch.autograd.Function):
        # With a separate setup_context, torch would look up the signature in every call.
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            results = run_forward(*arguments)
            save(ctx, arguments, results)
            return results

        @staticmethod
        def backward(
            ctx: Any, output_gradient: Tensor | None, _: Tensor | None, lse_gradient: Tensor | None
        ) -> tuple[Tensor | None, ...]:
            # A gradient that is to have a gradient itself needs the operator, and so does one that something watches.
            watched = torch.is_grad_enabled() or intercepted()
            return differentiate(ctx, output_gradient, _, lse_gradient, backward if watched else run_backward)

    def run(problem: Problem) -> Any:
        if run_forward is None or not problem.is_eager():
            return forward(*problem.arguments())
        if not torch.is_grad_enabled():
            return run_forward(*problem.arguments())
        return Eager.apply(*problem.arguments())  # type: ignore[no-untyped-call]

    return run
