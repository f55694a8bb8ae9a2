"""FLOATER: position vectors that follow a neural differential equation (Liu et al. 2020)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..checks import check_choice
from ..kernels.precision import without_autocast
from ..kernels.terms import Positions, PositionsLike
from ..kernels.torch_private import recording
from .base import ModelShape, PositionMethod, check_min, float_dtype, table_rows
from .site import Site

STEP = struct.unpack("f", struct.pack("f", 0.01))[0]
"""The time between neighboring positions: 0.01 in float32, as in the authors' models."""

Flow = Callable[[float, Tensor], Tensor]


def rk4(flow: Flow, time: float, step: float, state: Tensor) -> Tensor:
    """Return the state after one step of the fourth-order "3/8 rule"."""
    k1 = flow(time, state)
    k2 = flow(time + step / 3, state + step * k1 / 3)
    k3 = flow(time + step * 2 / 3, state + step * (k2 - k1 / 3))
    k4 = flow(time + step, state + step * (k1 - k2 + k3))
    return state + step * (k1 + 3 * (k2 + k3) + k4) / 8


def midpoint(flow: Flow, time: float, step: float, state: Tensor) -> Tensor:
    """Return the state after one step of the explicit midpoint rule."""
    return state + step * flow(time + step / 2, state + step / 2 * flow(time, state))


SOLVERS = {"rk4": rk4, "midpoint": midpoint}


def integrate(tensors: Sequence[Tensor], length: int, solver: str, substeps: int) -> Tensor:
    """Return the trajectory at positions 0 .. length - 1, (length, \\*initial.shape), by differentiable steps.

    ``tensors`` are ``initial``, the state at position 0, and the weights and biases of both linear maps.
    """
    initial, w1, b1, w2, b2 = tensors

    def flow(time: float, state: Tensor) -> Tensor:
        # [state; t] W^T, with the column of the time split off so that nothing is concatenated.
        hidden = torch.relu(functional.linear(state, w1[:, :-1], b1 + time * w1[:, -1]))
        return functional.linear(hidden, w2[:, :-1], b2 + time * w2[:, -1])

    advance, step = SOLVERS[solver], STEP / substeps
    if initial.device.type == "meta":
        # Without data, all steps at once have the same shapes and cost as one after another.
        steps = advance(flow, 0.0, step, initial.repeat((length - 1) * substeps, *[1] * initial.ndim))
        return torch.cat([initial.unsqueeze(0), steps.unflatten(0, (length - 1, substeps))[:, -1]])
    states = [initial]
    # Steps are small: half precision (also under autocast) would round them away.
    with without_autocast(initial.device):
        for position in range(length - 1):
            state = states[-1]
            for substep in range(substeps):
                state = advance(flow, position * STEP + substep * step, step, state)
            states.append(state)
    return torch.stack(states)


@torch.library.custom_op("whereformer::floater_trajectory", mutates_args=())
def _trajectory(tensors: list[Tensor], length: int, solver: str, substeps: int) -> Tensor:
    """Run :func:`integrate` as one node of a compiled graph, which would otherwise contain every step of the solver."""
    return integrate(tensors, length, solver, substeps)


@_trajectory.register_fake
def _(tensors: list[Tensor], length: int, solver: str, substeps: int) -> Tensor:
    return tensors[0].new_empty(length, *tensors[0].shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, *ctx.settings = inputs
    ctx.save_for_backward(*tensors)


@torch.library.custom_op("whereformer::floater_trajectory_backward", mutates_args=())
def _trajectory_gradients(grad: Tensor, tensors: list[Tensor], length: int, solver: str, substeps: int) -> list[Tensor]:
    with recording():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        states = integrate(leaves, length, solver, substeps)
        # At length 1, the states do not depend on the network.
        gradients = torch.autograd.grad(states, leaves, grad, allow_unused=True, materialize_grads=True)
    # Copy: at length 1 a gradient is a view of ``grad``, and an operator may not return a view of its input.
    return [gradient.clone() for gradient in gradients]


@_trajectory_gradients.register_fake
def _(grad: Tensor, tensors: list[Tensor], *settings: object) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None, None, None]:
    return _trajectory_gradients(grad, list(ctx.saved_tensors), *ctx.settings), None, None, None


_trajectory.register_autograd(_backward, setup_context=_save_for_backward)


class Floater(PositionMethod):
    """Adds a vector that moves with the position to the query, key and value of every layer.

    Every vector b starts at a trained b(0) and follows ``db/dt = [relu([b; t] W1 + c1); t] W2 + c2``, one network for
    all layers and for query, key and value; position i uses b(0.01 i). The vectors are added to the projections before
    query . key is scaled. The authors' models also keep a sinusoid at the input: ``sinusoidal+floater``.

    The gradient is exact for the discretized equation (backpropagation through the solver). The authors' released
    training loop refreshed the trajectory only every 400th call; this class does not imitate that.

    Args:
        solver: "rk4" (the 3/8 rule, as in the authors' translation models) or "midpoint" (as in their RoBERTa models).
        substeps: solver steps from one position to the next.
    Shape:
        initial: (3, num_layers, num_heads * head_dim) for query, key and value; Glorot uniform.
        hidden, out: linear maps with a column for the time, width x (width + 1); Glorot normal, biases 0.
    Extrapolation: any length, by integrating further; explicit positions must lie below max_length. The positions are
        computed one after the other, so this is the only method that is not parallel over positions.
    Source: Liu et al. (2020), arXiv 2003.09229; xuanqing94/FLOATER.
    """

    paper, year = "Liu et al.", 2020
    acts_on = frozenset({"queries", "keys", "values"})
    accepts_fractional = False
    needs_query_key = True

    def __init__(self, model: ModelShape, *, solver: str = "rk4", substeps: int = 5) -> None:
        super().__init__(model)
        check_choice("solver", solver, tuple(SOLVERS))
        check_min(1, substeps=substeps)
        self.solver = solver
        self.substeps = substeps
        width = model.num_heads * model.head_dim
        self.initial = nn.Parameter(torch.empty(3, model.num_layers, width))
        self.hidden = nn.Linear(width + 1, width)
        self.out = nn.Linear(width + 1, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = (6 / ((3 + self.initial.shape[1]) * self.initial.shape[2])) ** 0.5
        nn.init.uniform_(self.initial, -bound, bound)
        for linear in (self.hidden, self.out):
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)

    def trajectory(self, length: int) -> Tensor:
        """Return the vectors of positions 0 .. length - 1, (length, 3, num_layers, width), in float32 or wider."""
        dtype = float_dtype(self.initial)
        tensors = (self.initial, self.hidden.weight, self.hidden.bias, self.out.weight, self.out.bias)
        solve = _trajectory if torch.compiler.is_compiling() else integrate
        return solve([tensor.to(dtype) for tensor in tensors], length, self.solver, self.substeps)

    def compute_shared(self, site: Site) -> Tensor:
        """Return the trajectory up to the largest of these positions."""
        lengths = self._length(site.query_positions), self._length(site.transformed_key_positions)
        return self.trajectory(site.position_stop or max(lengths))

    def transform_qkv(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        vectors = self.get_shared(site)[:, :, site.layer]
        vectors = vectors.unflatten(-1, (self.model.num_heads, self.model.head_dim)).to(query.dtype)
        query_rows, key_rows = (
            table_rows(positions, vectors.shape[0], "floater", query.device, site.min_position)
            for positions in (site.query_positions, site.transformed_key_positions)
        )
        # (..., n, heads, head_dim) -> (..., heads, n, head_dim)
        return (
            query + vectors[:, 0][query_rows].transpose(-2, -3),
            key + vectors[:, 1][key_rows].transpose(-2, -3),
            value + vectors[:, 2][key_rows].transpose(-2, -3),
        )

    def _length(self, positions: PositionsLike) -> int:
        """Return the number of positions that a trajectory needs for these."""
        return max(positions.last + 1, 1) if isinstance(positions, Positions) else self.model.max_length
