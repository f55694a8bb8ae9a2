"""``project()`` is a layer after an activation, whose result it does not keep for the backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from whereformer.models.linear import project

SHAPES = {
    "rows": ((7, 24), 40),
    "batch": ((3, 5, 24), 40),
    "one row": ((1, 24), 40),
    "one feature": ((6, 1), 1),
    "four dimensions": ((2, 3, 4, 8), 8),
    "no row": ((0, 6), 7),
    "a vector": ((24,), 40),
}


def tensors(shape: tuple[int, ...], out: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (shape, (out, shape[-1]), (out,))
    hidden, weight, bias = (torch.randn(size, generator=generator, requires_grad=True) for size in sizes)
    return hidden, weight, bias


class Steps(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.sigmoid(hidden)


ACTIVATIONS = {"gelu": nn.GELU(), "several steps": Steps(), "relu": nn.ReLU(), "with a parameter": nn.PReLU()}


def copied(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(*weight.shape[::-1]).to(weight.dtype)
    layer.weight.data, layer.bias.data = weight.detach(), bias.detach()
    return layer


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_before_it(activation: str, shape: str) -> None:
    apply = ACTIVATIONS[activation]
    hidden, weight, bias = tensors(*SHAPES[shape])
    layer = copied(weight, bias)
    out, expected = project(layer, hidden, apply), layer(apply(hidden))
    torch.testing.assert_close(out, expected)
    gradient = torch.randn(expected.shape)
    inputs = (hidden, *layer.parameters(), *apply.parameters())
    found = torch.autograd.grad(out, inputs, gradient)
    for mine, reference in zip(found, torch.autograd.grad(expected, inputs, gradient), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


def test_what_an_activation_makes_is_not_kept() -> None:
    layer = nn.Linear(24, 40)
    hidden = torch.randn(5, 24, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        project(layer, hidden, nn.GELU())
    assert {tensor.data_ptr() for tensor in kept} == {hidden.data_ptr(), layer.weight.data_ptr()}


def test_second_derivatives_through_an_activation() -> None:
    layer = nn.Linear(6, 7).double()
    hidden = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def call(hidden: Tensor, *parameters: Tensor) -> Tensor:
        return project(layer, hidden, nn.GELU())

    inputs = (hidden, *layer.parameters())
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_an_activation_under_transforms() -> None:
    layer, gelu = nn.Linear(6, 7), nn.GELU()
    hidden = torch.randn(4, 3, 6)

    def loss(hidden: Tensor) -> Tensor:
        return project(layer, hidden, gelu).tanh().sum()

    def plain(hidden: Tensor) -> Tensor:
        return layer(gelu(hidden)).tanh().sum()

    for transform in (
        lambda function: torch.func.vmap(torch.func.grad(function))(hidden),
        lambda function: torch.func.hessian(function)(hidden[0]),
        lambda function: torch.autograd.functional.jacobian(function, hidden, vectorize=True),
    ):
        torch.testing.assert_close(transform(loss), transform(plain))


def test_gradients_in_batches() -> None:
    layer, gelu = nn.Linear(6, 7), nn.GELU()
    hidden = torch.randn(3, 6, requires_grad=True)
    gradients = torch.randn(5, 3, 7)
    found, wanted = (
        torch.autograd.grad(out, (hidden, layer.weight), gradients, is_grads_batched=True)
        for out in (project(layer, hidden, gelu), layer(gelu(hidden)))
    )
    torch.testing.assert_close(found, wanted)


def test_an_activation_under_autocast_and_compile() -> None:
    layer, gelu = nn.Linear(6, 7), nn.GELU()
    hidden = torch.randn(5, 6)
    expected = layer(gelu(hidden))
    with torch.autocast("cpu", torch.bfloat16):
        assert project(layer, hidden, gelu).dtype == torch.bfloat16
    compiled = torch.compile(lambda hidden: project(layer, hidden, gelu), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(hidden), expected)


def test_who_watches_a_layer_sees_what_it_always_saw() -> None:
    layer, gelu = nn.Linear(6, 7), nn.GELU()
    hidden = torch.randn(5, 6, requires_grad=True)
    expected = layer(gelu(hidden))
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: seen.extend(args))
    torch.testing.assert_close(project(layer, hidden, gelu), expected)
    torch.testing.assert_close(seen, [gelu(hidden)])
    handle.remove()
    handle = gelu.register_forward_hook(lambda _, args, out: out * 2)
    torch.testing.assert_close(project(layer, hidden, gelu), layer(2 * functional.gelu(hidden)))
    handle.remove()
    layer.forward = lambda hidden: hidden + 1  # type: ignore[method-assign]
    assert torch.equal(project(layer, hidden, gelu), gelu(hidden) + 1)
