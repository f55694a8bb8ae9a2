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


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(options, dtype):
    inputs, terms = content(LENGTH, LENGTH), terms_of(EVERY_KIND, LENGTH, LENGTH)

    def results(threads):
        torch.set_num_threads(threads)
        return run("native", dtype, inputs, terms, OPTIONS[options])

    one = results(1)
    for threads in (2, 3, 8):
        assert all(map(torch.equal, one, results(threads))), threads


def test_few_queries_do_not_depend_on_threads():
    """The parts of their keys are tasks too."""
    inputs, terms = content(2, 5000), terms_of(EVERY_KIND, 2, 5000)

    def results(threads):
        torch.set_num_threads(threads)
        return run("native", torch.float32, inputs, terms, {"causal": True})

    one = results(1)
    for threads in (2, 3, 8):
        assert all(map(torch.equal, one, results(threads))), threads


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

    def results(threads):
        torch.set_num_threads(threads)
        return run("native", torch.float32, inputs, terms, {})

    one = results(1)
    for threads in (1, 2, 3, 7):
        assert all(map(torch.equal, one, results(threads))), threads


def test_calls_from_several_threads_do_not_meet():
    torch.set_num_threads(2)
    inputs, terms = content(LENGTH, LENGTH), terms_of(EVERY_KIND, LENGTH, LENGTH)

    def results(_):
        return run("native", torch.float32, inputs, terms, {})

    one = results(None)
    with ThreadPoolExecutor(3) as pool:
        for other in pool.map(results, range(6)):
            assert all(map(torch.equal, one, other))
