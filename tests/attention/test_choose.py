"""Which backend ``backend="auto"`` takes, and what ``explain`` says of it."""

import pytest
import torch

from whereformer import OffsetBias, attention, explain

TERM = (OffsetBias(torch.zeros(2, 3), -1),)


def inputs(length, **options):
    return [torch.zeros(1, 2, length, 8, **options)] * 3


@pytest.mark.parametrize(
    ("length", "terms", "options", "chosen"),
    [
        (100, (), {}, "fused"),
        (100, (), {"causal": True}, "fused"),
        (100, (), {"dropout_p": 0.1}, "blockwise"),
        (100, (), {"key_mask": torch.ones(1, 100, dtype=torch.bool)}, "blockwise"),
        (10, (), {"key_mask": torch.ones(1, 10, dtype=torch.bool)}, "fused"),
        (90, TERM, {}, "reference"),
        (91, TERM, {}, "blockwise"),
        (91, TERM, {"backend": "reference"}, "reference"),
        (10, TERM, {"backend": "blockwise"}, "blockwise"),
        (10, (), {"backend": "reference"}, "reference"),
    ],
)
def test_the_rule(length, terms, options, chosen):
    choice = explain(*inputs(length), terms, **options)
    assert choice.backend == chosen
    assert str(choice).startswith(f"{chosen}: ")
    assert ("asked for by name" in choice.reason) == ("backend" in options)


def test_says_why_a_backend_is_out_of_reach(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if not torch.cuda.is_available():
        assert "needs" in explain(*inputs(100), TERM).unavailable["triton"]
    with pytest.raises(ValueError, match=r"^backend: backend 'triton' needs"):
        explain(*inputs(100), TERM, backend="triton")


def test_refuses_unknown_backends_and_bad_input_as_attention_does():
    with pytest.raises(ValueError, match=r"^backend: expected one of auto, reference, blockwise, triton, got 'fast'$"):
        explain(*inputs(4), backend="fast")
    with pytest.raises(TypeError, match="terms"):
        explain(*inputs(4), TERM[0])


def test_what_is_chosen_runs():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 100, 8) for _ in range(3))
    mask = torch.arange(100).unsqueeze(0) < 60
    expected = attention(query, key, value, key_mask=mask, backend="reference")
    torch.testing.assert_close(attention(query, key, value, key_mask=mask), expected)
