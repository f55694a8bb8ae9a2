"""The smoothed cross-entropy is torch's, gradient included, however many rows go at a time."""

import pytest
import torch
from torch.nn import functional

from whereformer.models.seq2seq import smoothed
from whereformer.models.seq2seq.smoothed import smoothed_cross_entropy


def inputs(dtype, rows=7, words=11):
    logits = (3 * torch.randn(rows, words, dtype=torch.float64)).to(dtype).requires_grad_()
    labels = torch.randint(words, (rows,))
    labels[::3] = -100
    return logits, labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("at_a_time", [1, 25, 2**20])
def test_it_is_torchs(smoothing, at_a_time, monkeypatch):
    monkeypatch.setitem(smoothed.AT_A_TIME, "cpu", at_a_time)
    logits, labels = inputs(torch.float64)
    expected = functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    (slope,) = torch.autograd.grad(2.5 * expected, logits)
    found = smoothed_cross_entropy(logits, labels, smoothing)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(2.5 * found, logits)[0], slope)
    assert torch.autograd.gradcheck(lambda each: smoothed_cross_entropy(each, labels, smoothing), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_float64_up_to_rounding(dtype):
    logits, labels = inputs(dtype, 200, 300)
    exact = logits.detach().double().requires_grad_()
    functional.cross_entropy(exact, labels, label_smoothing=0.1, reduction="sum").backward()
    found = smoothed_cross_entropy(logits, labels, 0.1)
    assert found.dtype == torch.float32
    found.backward()
    assert logits.grad.dtype == dtype
    # A gradient is a probability, which is off by what its logit and its row's sum are, less what should be there.
    shares = exact.detach().softmax(-1)
    off = 1 + exact.detach().abs() + exact.detach().abs().amax(-1, keepdim=True)
    sizes = shares * (off + (shares * off).sum(-1, keepdim=True)) + (shares - exact.grad).abs()
    allowed = 4 * torch.finfo(torch.float32).eps * sizes + torch.finfo(dtype).eps / 2 * exact.grad.abs()
    errors = (logits.grad.double() - exact.grad).abs()
    assert (errors <= allowed)[labels != -100].all()
    assert (errors == 0)[labels == -100].all()


@pytest.mark.parametrize("label", [-1, 99])
def test_a_label_that_is_no_token_is_refused(label):
    with pytest.raises(RuntimeError, match="out of bounds"):
        smoothed_cross_entropy(torch.zeros(2, 5), torch.tensor([label, 1]), 0.1)


def test_logits_far_from_zero_stay_numbers():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    smoothed_cross_entropy(logits, torch.tensor([1]), 0.1).backward()
    assert logits.grad.isfinite().all()
