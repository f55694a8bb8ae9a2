"""linear() must be torch's, whichever library computes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from whereformer import linear as module
from whereformer.linear import Linear, linear

SHAPES = {
    "rows": ((7, 24), 40),
    "batch": ((3, 5, 24), 40),
    "one row": ((1, 24), 40),
    "one feature": ((6, 1), 1),
    "four dimensions": ((2, 3, 4, 8), 8),
}


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """OneDNN for every product, on any processor that has it."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(module, "FEWEST", 1)
    monkeypatch.setattr(module, "onednn_is_faster", lambda: True)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the products that oneDNN computes in a test."""
    found: list[tuple[int, ...]] = []
    real = module.product

    def seen(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append((*left.shape, len(right)))
        return real(left, right, bias)

    monkeypatch.setattr(module, "product", seen)
    return found


def tensors(shape: tuple[int, ...], out: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (shape, (out, shape[-1]), (out,))
    hidden, weight, bias = (torch.randn(size, generator=generator, requires_grad=True) for size in sizes)
    return hidden, weight, bias


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch_and_the_float64_reference(shape: str, with_bias: bool, products: list[tuple[int, ...]]) -> None:
    inputs = tensors(*SHAPES[shape])[: 2 + with_bias]
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    out, expected = linear(*inputs), functional.linear(*exact)
    gradient = torch.randn(expected.shape)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out, inputs, gradient)
    for mine, reference in zip(found, torch.autograd.grad(expected, exact, gradient.double()), strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=1e-5, atol=1e-5)
    assert len(products) == 3  # forward, and the gradients of both factors


def test_any_strides() -> None:
    hidden = torch.randn(30, 2, 24).transpose(0, 1)[:, ::3]
    weight = torch.randn(24, 80)[:, ::2].mT
    bias = torch.randn(80)[::2]
    torch.testing.assert_close(linear(hidden, weight, bias), functional.linear(hidden, weight, bias))
    inputs = tensors((6, 24), 40)
    # The gradient of a sum has strides of zero.
    for mine, expected in zip(
        torch.autograd.grad(linear(*inputs).sum(), inputs),
        torch.autograd.grad(functional.linear(*inputs).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected)


def test_rows_with_gaps_between_them() -> None:
    inputs = torch.randn(5, 3, 24, requires_grad=True), *tensors((5, 24), 7)[1:]
    firsts = inputs[0][:, 0]
    for mine, expected in zip(
        torch.autograd.grad(linear(firsts, *inputs[1:]).square().sum(), inputs),
        torch.autograd.grad(functional.linear(firsts, *inputs[1:]).square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected)


def test_the_right_factor_never_has_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda left, right, *_: found.append(right) or left @ right.mT
    )
    for right in (torch.randn(6, 5, 4)[:, 0], torch.randn(4, 9)[:, :6].mT, torch.randn(6, 4), torch.randn(4, 6).mT):
        module.product(torch.randn(3, 4), right)
    assert [right.is_contiguous() for right in found] == [True, True, True, False]
    assert found[3].mT.is_contiguous()


def test_second_derivatives() -> None:
    def penalty(product: object) -> tuple[Tensor, ...]:
        inputs = tensors((5, 6), 7)
        out = product(*inputs)  # type: ignore[operator]
        gradients = torch.autograd.grad(out.tanh().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), inputs)

    for mine, expected in zip(penalty(linear), penalty(functional.linear), strict=True):
        torch.testing.assert_close(mine, expected)


def test_under_vmap_of_grad() -> None:
    hidden, weight, bias = (x.detach() for x in tensors((4, 3, 6), 7))

    def loss(product: object) -> object:
        return lambda weight, hidden: product(hidden, weight, bias).tanh().sum()  # type: ignore[operator]

    mine, expected = (
        torch.func.vmap(torch.func.grad(loss(product)), (None, 0))(weight, hidden)
        for product in (linear, functional.linear)
    )
    torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype, products: list[tuple[int, ...]]) -> None:
    hidden, weight, bias = (x.detach().to(dtype) for x in tensors((5, 6), 7))
    assert torch.equal(linear(hidden, weight, bias), functional.linear(hidden, weight, bias))
    assert not products


def test_what_is_left_to_torch(products: list[tuple[int, ...]]) -> None:
    layer = Linear(6, 7)
    hidden = torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(hidden).dtype == torch.bfloat16
    torch.backends.mkldnn.set_flags(False)
    try:
        assert torch.equal(layer(hidden), functional.linear(hidden, layer.weight, layer.bias))
    finally:
        torch.backends.mkldnn.set_flags(True)
    assert layer(torch.randn(6)).shape == (7,)
    assert layer(torch.randn(0, 6)).shape == (0, 7)
    torch.compile(layer, fullgraph=True, backend="eager")(hidden)
    assert not products
    layer(hidden)
    assert products == [(5, 6, 7)]


def test_small_products_are_left_to_torch(monkeypatch: pytest.MonkeyPatch, products: list[tuple[int, ...]]) -> None:
    monkeypatch.setattr(module, "FEWEST", 5 * 6 * 7)
    linear(*tensors((4, 6), 7))
    assert not products
    linear(*tensors((5, 6), 7))
    assert products == [(5, 6, 7)]


def test_counts_the_same_flops() -> None:
    inputs = tensors((5, 6), 7)

    def flops(product: object) -> int:
        with FlopCounterMode(display=False) as counter:
            product(*inputs).sum().backward()  # type: ignore[operator]
        return counter.get_total_flops()

    assert flops(linear) == flops(functional.linear) == 3 * 2 * 5 * 6 * 7


def test_is_a_linear_layer() -> None:
    layer = Linear(6, 7)
    assert isinstance(layer, nn.Linear)
    torch.manual_seed(0)
    mine = Linear(6, 7).state_dict()
    torch.manual_seed(0)
    theirs = nn.Linear(6, 7).state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


ACTIVATIONS = {"gelu": functional.gelu, "several steps": lambda x: x * torch.sigmoid(x), "relu": torch.relu}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_before_it(activation: str, shape: str) -> None:
    apply = ACTIVATIONS[activation]
    inputs = tensors(*SHAPES[shape])
    hidden, weight, bias = inputs
    layer = Linear(*weight.shape[::-1])
    layer.weight.data, layer.bias.data = weight.data, bias.data
    out, expected = layer(hidden, apply), functional.linear(apply(hidden), weight, bias)
    torch.testing.assert_close(out, expected)
    gradient = torch.randn(expected.shape)
    found = torch.autograd.grad(out, (hidden, layer.weight, layer.bias), gradient)
    for mine, reference in zip(found, torch.autograd.grad(expected, inputs, gradient), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


def test_what_an_activation_makes_is_not_kept() -> None:
    layer = Linear(24, 40)
    hidden = torch.randn(5, 24, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden, functional.gelu)
    assert {tensor.data_ptr() for tensor in kept} == {hidden.data_ptr(), layer.weight.data_ptr()}


def test_second_derivatives_through_an_activation() -> None:
    layer = Linear(6, 7).double()
    hidden = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def call(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        given = {"weight": weight, "bias": bias}
        out: Tensor = torch.func.functional_call(layer, given, (hidden, functional.gelu))
        return out

    inputs = (hidden, layer.weight, layer.bias)
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_an_activation_under_vmap_of_grad() -> None:
    layer = Linear(6, 7)
    hidden = torch.randn(4, 3, 6)

    def loss(hidden: Tensor) -> Tensor:
        return layer(hidden, functional.gelu).tanh().sum()

    def plain(hidden: Tensor) -> Tensor:
        return functional.linear(functional.gelu(hidden), layer.weight, layer.bias).tanh().sum()

    mine, expected = (torch.func.vmap(torch.func.grad(function))(hidden) for function in (loss, plain))
    torch.testing.assert_close(mine, expected)


def test_an_activation_under_autocast_and_compile() -> None:
    layer = Linear(6, 7)
    hidden = torch.randn(5, 6)
    expected = layer(functional.gelu(hidden))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(hidden, functional.gelu).dtype == torch.bfloat16
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(hidden, functional.gelu), expected)
