"""Fitting TISA's kernels to curves."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden import check, groups
from whereformer.analysis import TisaFit, fit_tisa, fit_tisa_up_to
from whereformer.analysis.fit import kernels
from whereformer.analysis.toeplitz import pairs

GRAMS, FITS = groups("positions/analysis", ("random", "sinusoid", "noisy", "two", "one"), "fit")


def offsets_of(n):
    return torch.arange(1 - n, n, dtype=torch.float64)


def planted(n, amplitude, sharpness, center):
    """The curve of these kernels, (2 n - 1)."""
    parameters = (torch.tensor(part, dtype=torch.float64) for part in (sharpness, center))
    return kernels(offsets_of(n), *parameters) @ torch.tensor(amplitude, dtype=torch.float64)


def loss_of(curve, amplitude, sharpness, center):
    """What a fit minimizes, but for its penalty."""
    weights = pairs((curve.shape[-1] + 1) // 2).double()
    fit = TisaFit(amplitude, sharpness, center, torch.zeros(()), torch.ones(()))
    return ((fit.curve(offsets_of(len(weights) // 2 + 1)) - curve) ** 2) @ weights


@pytest.mark.parametrize("case", FITS)
def test_golden_loss_and_gradients(case):
    stored = case.stored
    parameters = [stored[name].mT.clone().requires_grad_() for name in ("amplitudes0", "sharpness0", "offsets0")]
    assert pairs(case.config["n"]).tolist() == stored["count"].tolist()
    loss = loss_of(stored["profile"], *parameters)
    check(loss, stored["loss"], 1e-9)
    gradients = torch.autograd.grad(loss.sum(), parameters)
    for name, gradient in zip(("amplitudes0", "sharpness0", "offsets0"), gradients, strict=True):
        check(gradient.mT, stored[f"grad_{name}"], 1e-9)


@pytest.mark.parametrize("case", FITS)
def test_golden_curves_are_recovered(case):
    stored = case.stored
    fit = fit_tisa(stored["profile"], case.config["S"])
    assert (fit.explained > 0.999).all()
    assert fit.constant.tolist() == [0.0, 0.0]
    planted_parameters = [stored[name].mT for name in ("amplitudes", "sharpness", "offsets")]
    check(loss_of(stored["profile"], *planted_parameters), torch.zeros(2, dtype=torch.float64), 1e-12)
    if case.config["S"] == 1:
        for actual, expected in zip((fit.amplitude, fit.sharpness, fit.center), planted_parameters, strict=True):
            check(actual, expected, 1e-4)


KERNEL = st.tuples(
    st.floats(0.3, 3).flatmap(lambda size: st.sampled_from((size, -size))),
    st.floats(-3.5, 1).map(lambda log: 2.718281828**log),  # from 4 tokens wide to less than one
    st.floats(-6, 6),
)


@settings(max_examples=25)
@given(KERNEL, st.floats(0, 0.1), st.floats(-2, 2), st.integers(0, 2**31))
def test_one_planted_kernel_is_found_in_noise(kernel, noise, constant, seed):
    """Where a kernel meets an offset at all, its shape is recovered as far as the noise lets."""
    amplitude, sharpness, center = kernel
    curve = planted(48, [amplitude], [sharpness], [center])
    noisy = curve + constant
    noisy = noisy + noise * abs(amplitude) * torch.randn(95, generator=torch.Generator().manual_seed(seed))
    fit = fit_tisa(noisy, 1, constant=True)
    truth = 1 - _share(noisy, noisy - curve - constant)
    assert fit.explained >= truth - 1e-5  # at least as good as the planted one
    if noise < 1e-3 and sharpness < 0.5:
        assert float(fit.center) == pytest.approx(center, abs=0.05)
        assert float(fit.amplitude) == pytest.approx(amplitude, rel=0.05)
        assert float(fit.sharpness) == pytest.approx(sharpness, rel=0.1)
        assert float(fit.constant) == pytest.approx(constant, abs=0.05 * abs(amplitude))


@settings(max_examples=12)
@given(st.lists(KERNEL, min_size=2, max_size=4), st.floats(0, 0.05), st.integers(0, 2**31))
def test_more_kernels_never_explain_less(planted_kernels, noise, seed):
    curve = planted(40, *(list(part) for part in zip(*planted_kernels, strict=True)))
    noisy = curve + noise * torch.randn(79, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    fits = fit_tisa_up_to(noisy, len(planted_kernels) + 1)
    explained = [float(fit.explained) for fit in fits]
    # But for the penalty, which may prefer smaller amplitudes.
    assert all(larger >= smaller - 1e-3 for smaller, larger in itertools.pairwise(explained))
    for fit in fits:
        assert (fit.sharpness > 0).all()
        assert fit.explained <= 1


def _share(curve, rest):
    """The share of a curve's weighted variance that is ``rest``."""
    weight = pairs((len(curve) + 1) // 2).double()
    mean = (weight * curve).sum() / weight.sum()
    return float((weight * rest**2).sum() / (weight * (curve - mean) ** 2).sum())


def test_explained_is_what_it_says():
    curve = planted(20, [1.0, -0.5], [0.1, 0.01], [-1.0, 4.0]) + 0.1 * torch.randn(39, dtype=torch.float64)
    for constant in (False, True):
        fit = fit_tisa(curve, 1, constant=constant)
        assert float(fit.explained) == pytest.approx(1 - _share(curve, curve - fit.curve(offsets_of(20))), abs=1e-9)
        loss = loss_of(curve, fit.amplitude, fit.sharpness, fit.center)
        rest = pairs(20).double() @ (curve - fit.curve(offsets_of(20)) + fit.constant) ** 2
        assert float(loss) == pytest.approx(float(rest), rel=1e-9)


def test_kernels_that_cancel_stay_of_a_size_with_the_curve():
    """A ramp is the difference of two wide kernels; the wider they are, the better, but not at any price."""
    fit = fit_tisa(offsets_of(64), 4, constant=True)
    assert fit.explained > 0.99
    assert fit.amplitude.abs().max() < 100 * 126


def test_curves_are_fitted_each_by_itself():
    curves = torch.stack([planted(24, [1.0], [0.2], [center]) for center in (-1.0, 0.0, 3.0)])
    together = fit_tisa(curves.view(3, 1, -1), 2)
    assert together.center.shape == (3, 1, 2)
    assert together[0].center.shape == (1, 2)
    alone = fit_tisa(curves[2], 2)
    assert alone.center.shape == (2,)
    assert alone.explained.shape == ()
    check(together.curve(offsets_of(24))[2, 0], alone.curve(offsets_of(24)), 1e-6)


def test_a_constant_costs_no_precision():
    curve = planted(16, [1.0], [0.3], [2.0])
    fit, lifted = fit_tisa(curve, 1, constant=True), fit_tisa(curve + 1e9, 1, constant=True)
    check(lifted.center, fit.center, 1e-4)
    check(lifted.amplitude, fit.amplitude, 1e-4)
    assert float(lifted.constant) == pytest.approx(1e9 + float(fit.constant), abs=1e-4)


def test_nothing_to_explain():
    for n in (1, 2, 5):
        flat = fit_tisa(torch.full((2 * n - 1,), 3.0), 2, constant=True)
        assert float(flat.explained) == 1
        check(flat.curve(offsets_of(n)), torch.full((2 * n - 1,), 3.0, dtype=torch.float64), 1e-3)
    none = fit_tisa(torch.randn(9), 0, constant=True)
    assert none.amplitude.shape == (0,)
    assert float(none.explained) == pytest.approx(0, abs=1e-9)


def test_single_positions_and_odd_curves():
    for size in (1, 3, 5):
        fits = fit_tisa_up_to(torch.randn(2, size), 3)
        assert all(torch.isfinite(part).all() for fit in fits for part in vars(fit).values())
        # Three kernels can be three numbers.
        if size <= 3:
            assert (fits[-1].explained > 0.99).all()


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_units_do_not_matter(scale):
    curve = planted(16, [1.0, 0.4], [0.3, 0.02], [0.0, -3.0])
    fit, scaled = fit_tisa(curve, 2), fit_tisa(curve * scale, 2)
    check(scaled.amplitude / scale, fit.amplitude, 1e-5)
    check(scaled.explained, fit.explained, 1e-7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1), "curve: expected shape .*odd number of offsets"),
        ((1.0, 1), "curve: expected shape"),
        (([1.0, 2.0], 1), r"curve: expected shape .*got \(2,\)"),
        (([1.0, float("nan"), 0.0], 1), "curve: expected finite real numbers"),
        (([1j, 0, 0], 1), "curve: expected finite real numbers"),
        (([1.0, 2.0, 3.0], -1), "num_kernels: expected at least 0, got -1"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_tisa(*arguments)
