"""Any number of threads gives the same bits; ``make sanitize-threads`` watches what they share."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.kernels.cases import DIM, EVERY_KIND, content, need_native, run, terms_of
from whereformer import DenseBias, OffsetBias, OffsetValues

# Enough multiplications to start threads.
LENGTH = 300
OPTIONS = {"plain": {}, "causal": {"causal": True}, "dropout": {"dropout_p": 0.2}, "window": {"window": (200, 30)}}


@pytest.fixture(autouse=True)
def _native():
    need_native()
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check_threads(inputs, terms, options, dtype=torch.float32):
    """Any number of threads computes the same bits, and one thread computes them twice."""
    results = {}
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results[threads] = run("native", dtype, inputs, terms, options)
    torch.set_num_threads(1)
    again = run("native", dtype, inputs, terms, options)
    for threads, tensors in results.items():
        assert all(map(torch.equal, again, tensors)), threads


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(options, dtype):
    check_threads(content(LENGTH, LENGTH), terms_of(EVERY_KIND, LENGTH, LENGTH), OPTIONS[options], dtype)


def test_few_queries_do_not_depend_on_threads():
    """The parts of their keys are tasks too."""
    check_threads(content(2, 5000), terms_of(EVERY_KIND, 2, 5000), {"causal": True})


@pytest.mark.parametrize(
    ("batch", "heads", "shared"), [(1, 1, False), (5, 1, True), (21, 1, False)], ids=["rows", "one sum", "items"]
)
def test_parts_do_not_depend_on_threads(batch, heads, shared):
    """Parts whose gradients are summed: of the rows where heads are few, of the batch where it is large."""
    n = 1100 if batch == 1 else 130
    inputs = [tensor[:, :heads] for tensor in content(n, n, batch=batch)]
    terms = [(OffsetBias, [torch.randn(heads, 9)], -4), (OffsetValues, [torch.randn(1, 9, DIM)], -4)]
    if shared:
        terms.append((DenseBias, [torch.randn(1, heads, n, n)], None))
    check_threads(inputs, terms, {})


def test_calls_from_several_threads_do_not_meet():
    torch.set_num_threads(2)
    inputs, terms = content(LENGTH, LENGTH), terms_of(EVERY_KIND, LENGTH, LENGTH)

    def results(_):
        return run("native", torch.float32, inputs, terms, {})

    one = results(None)
    with ThreadPoolExecutor(3) as pool:
        for result in pool.map(results, range(6)):
            assert all(map(torch.equal, one, result))
