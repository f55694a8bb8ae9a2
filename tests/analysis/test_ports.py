"""Ports of attention are identified, whatever they do differently."""

import pytest
import torch

import whereformer
from whereformer.analysis.ports import identify
from whereformer.errors import InputError

SIZES = {"hidden_size": 32, "num_heads": 2}
LENGTH = 16
OFFSETS = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]


def methods(*names):
    return {name: whereformer.build_position(name, **SIZES) for name in names}


def attention_with(bias, causal=False):
    """Softmax attention with a bias (heads, n, n)."""

    def attend(query, key, value):
        scores = query @ key.mT / 4 + bias
        return (scores.masked_fill(OFFSETS > 0, -torch.inf) if causal else scores).softmax(-1) @ value

    return attend


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("shift", "answer"), [(0, "this is alibi"), (1, "alibi, but offsets are off by +1")])
def test_the_output_of_attention_shows_the_method(shift, answer, causal):
    slopes = torch.tensor([2**-4, 2**-8]).double()[:, None, None]
    code = attention_with(-slopes * (OFFSETS + shift).abs(), causal)
    assert identify(code, methods("none", "rope", "alibi"), returns_weights=True) == answer


def test_an_unknown_bias_is_no_method():
    code = attention_with(torch.sin(OFFSETS.double()))
    answer = identify(code, methods("none", "rope", "alibi"), returns_weights=True)
    assert answer == "no method explains these scores"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (lambda query, key: query, r"expected it to return a tensor of shape \(1, 2, 12, 12\), got \(1, 2, 12, 16\)"),
        (lambda query, key: 7, r"expected it to return a tensor of shape \(1, 2, 12, 12\), got 7"),
        (lambda query, key: query @ key, "it raised RuntimeError: .*test_ports.py, line"),
        (lambda query, key: query @ key.mT / 0, "expected finite scores"),
    ],
)
def test_what_is_no_port_is_refused(code, message):
    with pytest.raises(InputError, match=message):
        identify(code, methods("none"), returns_weights=False)
