"""``linear()`` equals torch's, whichever library computes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from tests.onednn import need_onednn, without_onednn
from whereformer.kernels import tuning
from whereformer.kernels.cpu import products as module
from whereformer.kernels.cpu.products import linear, project

SHAPES = {
    "rows": ((7, 24), 40),
    "batch": ((3, 5, 24), 40),
    "one row": ((1, 24), 40),
    "one feature": ((6, 1), 1),
    "four dimensions": ((2, 3, 4, 8), 8),
}


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """OneDNN for every product, on any processor that has it."""
    need_onednn()
    monkeypatch.setattr(tuning, "FEWEST_IN_LAYERS", 1)
    with tuning.use(onednn=True):
        yield


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the products that oneDNN computes in a test."""
    found: list[tuple[int, ...]] = []
    real = module.product_transposed

    def seen(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append((*left.shape, len(right)))
        return real(left, right, bias)

    monkeypatch.setattr(module, "product_transposed", seen)
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
        module.product_transposed(torch.randn(3, 4), right)
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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, in forward mode
def test_what_is_left_to_torch(products: list[tuple[int, ...]]) -> None:
    layer = nn.Linear(6, 7)
    hidden = torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert project(layer, hidden).dtype == torch.bfloat16
    with without_onednn():
        assert torch.equal(project(layer, hidden), layer(hidden))
    assert project(layer, torch.randn(6)).shape == (7,)
    assert project(layer, torch.randn(0, 6)).shape == project(layer, torch.randn(0, 6), nn.GELU()).shape == (0, 7)
    torch.compile(lambda hidden: project(layer, hidden), fullgraph=True, backend="eager")(hidden)
    torch.func.jacfwd(lambda hidden: project(layer, hidden))(hidden)
    two = torch.tensor(2.0)
    assert torch.equal(linear(hidden, layer.weight, two), functional.linear(hidden, layer.weight, two))
    with pytest.raises(RuntimeError, match="5x6 and 5x7"):
        linear(hidden, torch.randn(7, 5))
    assert not products
    project(layer, hidden)
    assert products == [(5, 6, 7)]


def test_sizes_that_follow_the_data_are_few(monkeypatch: pytest.MonkeyPatch, products: list[tuple[int, ...]]) -> None:
    """OneDNN keeps a program for every shape."""
    regular = [size for size in range(1, 5000) if module.is_regular(size)]
    assert [size for size in regular if size > 500] == [
        *(510, 511, 512, 766, 767, 768, 1022, 1023, 1024, 1534, 1535, 1536, 2046, 2047, 2048),
        *(3070, 3071, 3072, 4094, 4095, 4096),
    ]
    layer = nn.Linear(6, 7)
    for rows in (100, 128):
        for activation in (None, nn.GELU()):
            project(layer, torch.randn(rows, 6, requires_grad=True), activation).sum().backward()
    assert products == 2 * [(128, 6, 7), (128, 7, 6), (7, 128, 6)]


def test_small_products_are_left_to_torch(monkeypatch: pytest.MonkeyPatch, products: list[tuple[int, ...]]) -> None:
    monkeypatch.setattr(tuning, "FEWEST_IN_LAYERS", 5 * 6 * 7)
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


class Steps(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.sigmoid(hidden)


ACTIVATIONS = {"gelu": nn.GELU(), "several steps": Steps(), "relu": nn.ReLU(), "with a parameter": nn.PReLU()}


def copied(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(*weight.shape[::-1]).to(weight.dtype)
    layer.weight.data, layer.bias.data = weight.detach(), bias.detach()
    return layer


@pytest.mark.parametrize("shape", [*SHAPES, "a vector"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_before_it(activation: str, shape: str) -> None:
    apply = ACTIVATIONS[activation]
    hidden, weight, bias = tensors(*SHAPES.get(shape, ((24,), 40)))
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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, in forward mode
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
    for activation in (None, gelu):
        expected = layer(hidden if activation is None else activation(hidden))
        found, wanted = (
            torch.autograd.grad(out, (hidden, layer.weight), gradients, is_grads_batched=True)
            for out in (project(layer, hidden, activation), expected)
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
    assert torch.equal(project(layer, hidden), hidden + 1)
