"""Peak memory is counted, but for a few bytes of numbers."""

import pytest
import torch

from benchmarks.peak import peak_memory

CPU = torch.device("cpu")
MIB = 2**20


def in_turn():
    first = torch.zeros(MIB // 4)
    second = first + 1
    del first
    third = second * 2
    del second, third


def backward():
    # exp keeps its result; backward makes its gradient and, for a moment, the product of the two.
    LEAF.view(-1, 2).transpose(0, 1).exp().sum().backward()


@torch.library.custom_op("test_memory::wasteful", mutates_args=())
def wasteful(given: torch.Tensor) -> torch.Tensor:
    return torch.zeros(MIB // 4).sum() + given


LEAF, NUMBER = torch.zeros(MIB // 4, requires_grad=True), torch.zeros(())


@pytest.mark.parametrize(
    ("work", "least", "most"),
    [(in_turn, 2, 2 * MIB + 64), (backward, 2, 3 * MIB + 64), (lambda: wasteful(NUMBER), 1, MIB + 256)],
    ids=["only what lives at once", "what backward needs, and no views", "what an operation uses within itself"],
)
def test_what_counts(work, least, most):
    assert least * MIB <= peak_memory(work, CPU) <= most


def test_counting_ends_where_the_work_fails():
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            peak_memory(lambda: 1 / 0, CPU)
