"""Toeplitzness, the Toeplitz part and the diagonals."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peak import peak_memory
from tests.golden import check, groups
from whereformer.analysis import diagonals, toeplitz_part, toeplitzness
from whereformer.analysis.toeplitz import from_diagonals

GRAMS, _FITS = groups("positions/analysis", ("random", "sinusoid", "noisy", "two", "one"), "fit")
SIZES = st.integers(1, 12)


def means_of(matrix):
    return diagonals(matrix).mean


def slowly(matrix):
    """The definition, a diagonal at a time."""
    n = matrix.shape[-1]
    return torch.stack([matrix.diagonal(offset, -2, -1).mean(-1) for offset in range(1 - n, n)], -1)


@pytest.mark.parametrize("case", GRAMS)
def test_golden(case):
    stored = case.stored
    table, mean = stored["E"], stored["e_mean"]
    gram = table @ table.T
    check(gram, stored["P"], 1e-12)
    check(means_of(gram), stored["diag_mean"], 1e-12)
    check(toeplitz_part(gram), stored["toeplitz"], 1e-12)
    check(toeplitzness(gram)[None], stored["r2"], 1e-9)
    heads = case.config["H"]
    query, key = (stored[name].unflatten(1, (heads, -1)).transpose(0, 1) for name in ("Wq", "Wk"))
    for rows, scores, r2 in ((table, "F_pos", "r2_pos"), (table + mean, "F_avg", "r2_avg")):
        actual = (rows @ query) @ (rows @ key).mT
        check(actual, stored[scores], 1e-12)
        check(toeplitzness(actual), stored[r2], 1e-9)
    check(means_of(stored["F_pos"]), stored["profile_pos"], 1e-12)


@given(SIZES, st.integers(1, 3), st.integers(0, 2**31))
def test_diagonals_are_those_of_the_definition(n, batch, seed):
    matrix = torch.randn(batch, 2, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    matrix = matrix.transpose(-1, -2)  # not contiguous
    means = slowly(matrix)
    check(means_of(matrix), means, 1e-12)
    index = torch.arange(n)[None, :] - torch.arange(n)[:, None] + n - 1
    part = means[..., index]
    check(toeplitz_part(matrix), part, 1e-12)
    measured = diagonals(matrix)
    check(measured.mean, means, 1e-12)
    check(measured.spread, slowly((matrix - part) ** 2).sqrt(), 1e-9)
    rest, total = ((x**2).sum((-1, -2)) for x in (matrix - part, matrix - matrix.mean((-1, -2), keepdim=True)))
    expected = torch.where(total > 0, 1 - rest / total, 1.0)
    check(toeplitzness(matrix), expected, 1e-9)
    check(measured.explained, expected, 1e-9)


@given(SIZES, st.integers(0, 2**31), st.floats(1e-3, 1e3), st.floats(-100, 100))
def test_toeplitzness_keeps_to_its_laws(n, seed, scale, shift):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2 * n - 1, dtype=torch.float64, generator=generator)
    toeplitz = from_diagonals(values)
    check(toeplitz_part(toeplitz), toeplitz, 1e-12)
    check(toeplitzness(toeplitz), torch.tensor(1.0, dtype=torch.float64), 1e-9)
    matrix = torch.randn(n, n, dtype=torch.float64, generator=generator)
    share = toeplitzness(matrix)
    assert 0 <= share <= 1
    for changed in (scale * matrix + shift, matrix.mT, matrix.flip(-1, -2), -matrix):
        check(toeplitzness(changed), share, 1e-7)
    check(toeplitz_part(toeplitz_part(matrix)), toeplitz_part(matrix), 1e-12)
    check(means_of(matrix.mT), means_of(matrix).flip(-1), 1e-12)


def test_independent_entries():
    assert float(toeplitzness(torch.randn(255, 255))) == pytest.approx(2 / 256, rel=0.2)


@pytest.mark.parametrize("matrix", [torch.full((4, 4), 0.1), torch.full((4, 4), 0.1).double(), torch.zeros(3, 3)])
def test_equal_entries_are_all_toeplitz(matrix):
    assert toeplitzness(matrix) == 1
    check(toeplitz_part(matrix), matrix.double(), 1e-7)


def test_rounding_of_equal_entries_is_no_structure():
    row = torch.randn(1, 64, dtype=torch.float64)
    gram = row.expand(9, -1) @ row.T.expand(-1, 9) + 1e-16 * torch.randn(9, 9, dtype=torch.float64)
    assert toeplitzness(gram) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_dtypes(dtype):
    matrix = (torch.arange(36).reshape(6, 6) % 5).to(dtype)
    for function in (toeplitzness, toeplitz_part, means_of):
        assert torch.equal(function(matrix), function(matrix.double()))


def test_numpy_and_lists():
    matrix = [[1.0, 2.0], [3.0, 5.0]]
    assert means_of(matrix).tolist() == [3.0, 3.0, 2.0]
    check(toeplitzness(torch.tensor(matrix).numpy()), toeplitzness(matrix), 1e-7)


@pytest.mark.parametrize("function", [toeplitzness, toeplitz_part])
@pytest.mark.parametrize(
    ("matrix", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"matrix: expected shape \(..., n, n\), n at least 1, got \(3,\)"),
        (torch.zeros(2, 3), ValueError, r"matrix: expected shape \(..., n, n\), n at least 1, got \(2, 3\)"),
        (torch.zeros(2, 0, 0), ValueError, r"matrix: expected shape \(..., n, n\), n at least 1, got \(2, 0, 0\)"),
        (torch.zeros(2, 2, dtype=torch.cfloat), ValueError, "matrix: expected finite real numbers"),
        (torch.tensor([[1.0, float("nan")], [0.0, 0.0]]), ValueError, "matrix: expected finite real numbers, got NaN"),
        (torch.tensor([[1.0, float("inf")], [-float("inf"), 0]]), ValueError, "matrix: expected finite real numbers"),
    ],
)
def test_bad_matrices(function, matrix, error, message):
    with pytest.raises(error, match=message):
        function(matrix)


def test_toeplitzness_computes_no_other_matrix_of_that_size():
    """The spread of each diagonal, which nobody asked for, would take several."""
    n = 1200
    matrix = torch.randn(n, n, dtype=torch.float64)
    assert peak_memory(lambda: toeplitzness(matrix)) < 8 * n * n


def test_gradients():
    matrix = torch.randn(2, 5, 5, dtype=torch.float64, requires_grad=True)
    for function in (toeplitzness, toeplitz_part, means_of):
        assert torch.autograd.gradcheck(function, matrix)


@pytest.mark.slow
def test_needs_torch_alone():
    code = """
import sys
sys.modules["transformers"] = None
sys.modules["scipy"] = None
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else real(name, *rest)
from whereformer import analysis
print(float(analysis.toeplitzness([[1.0]])), len(analysis.fit_tisa([0.0, 1.0, 0.0], 1).center))
try:
    analysis.count_flops
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "1.0 1",
        'this needs transformers, which is not installed; in whereformer\'s clone run: pip install ".[hf]"',
    ]
