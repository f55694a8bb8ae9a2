"""``pope`` against complex numbers, and against the real ones that x-transformers concatenates."""

import math

import pytest
import torch
from torch.nn import functional

from tests.positions.stack import HEADS, LAYERS, MAX_LENGTH, WIDTH
from whereformer import Place, Positions, attention, build_position

HEAD_DIM = WIDTH // HEADS
SIZES = {"hidden_size": WIDTH, "num_heads": HEADS, "num_layers": LAYERS, "max_length": MAX_LENGTH}
LAYER = 1


def build(**options):
    position = build_position("pope", **SIZES, **options).double()
    torch.nn.init.uniform_(position.phase, -2 * math.pi, 0)
    return position


def heads(n):
    return torch.randn(2, HEADS, n, HEAD_DIM, dtype=torch.float64)


def attend(position, query, key, value, places, **options):
    place = Place(*places, LAYER, **options)
    terms = position.content_terms(query, key, place)
    return attention(*position.rotate(query, key, value, place), terms, scale=options.get("scale"))


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(
    "places",
    [
        (Positions(0, 1, 7), Positions(0, 1, 7)),
        (Positions(5, 1, 3), Positions(0, 2, 8)),
        (torch.tensor([2.5, -3.0]), torch.tensor([[0.0, 1.0, 9.5], [4.0, 4.0, 2.0]])),
    ],
    ids=["square", "strided", "explicit"],
)
def test_scores_are_products_of_complex_numbers(places, scale):
    position = build(base=300.0)
    values = [torch.atleast_2d(at.values() if isinstance(at, Positions) else at).double() for at in places]
    query, key, value = heads(values[0].shape[-1]), heads(values[1].shape[-1]), heads(values[1].shape[-1])
    theta = torch.tensor([300.0 ** (-c / HEAD_DIM) for c in range(HEAD_DIM)], dtype=torch.float64)
    numbers = [
        torch.polar(functional.softplus(features), (at[:, None, :, None] * theta + phase).expand_as(features))
        for features, at, phase in (
            (query, values[0], torch.zeros(())),
            (key, values[1], position.phase.detach()[LAYER][:, None]),
        )
    ]
    scores = (numbers[0].conj() @ numbers[1].mT).real * (HEAD_DIM**-0.5 if scale is None else scale)
    expected = scores.softmax(-1) @ value
    torch.testing.assert_close(
        attend(position, query, key, value, places, scale=scale), expected, rtol=1e-11, atol=1e-11
    )


def test_phases_are_cut_but_their_gradients_are_not():
    position, at = build(), Positions(0, 1, 5)
    query, key, value = heads(5), heads(5), heads(5)
    found = []
    for phase in (1.0, 0.0):
        position.phase.data.fill_(phase)
        position.phase.grad = None
        out = attend(position, query, key, value, (at, at))
        out.square().sum().backward()
        found.append((out, position.phase.grad.clone()))
    torch.testing.assert_close(*found)
    assert found[0][1][LAYER].abs().min() > 0


def test_gradients_by_numbers():
    position, at = build(), Positions(2, 1, 3)
    tensors = [tensor.requires_grad_() for tensor in (heads(3)[:1], heads(3)[:1], heads(3)[:1])]

    def run(query, key, value, phase):
        del position.phase
        position.phase = phase
        return attend(position, query, key, value, (at, at))

    phase = position.phase.detach().clone().requires_grad_()
    del position._parameters["phase"]
    position.phase = phase
    torch.autograd.gradcheck(run, (*tensors, phase))


@pytest.mark.parametrize("other", ["logn", "rope", "deberta", "floater", "transformer_xl"])
def test_methods_that_change_query_or_key_cannot_be_joined_with_it(other):
    for joined in (f"pope+{other}", f"{other}+pope"):
        with pytest.raises(
            ValueError, match=r"^position: Pope makes scores of query and key in its own way, so it can't"
        ):
            build_position(joined, **SIZES)
    build_position("pope+inkling+tisa", **SIZES)
