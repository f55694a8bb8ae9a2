"""Peak memory is counted, but for a few bytes of numbers."""

import pytest
import torch

from whereformer.lab.memory import peak_memory

CPU = torch.device("cpu")
MIB = 2**20


def test_only_what_lives_at_once_counts():
    def work():
        first = torch.zeros(MIB // 4)
        second = first + 1
        del first
        third = second * 2
        del second, third

    assert 2 * MIB <= peak_memory(work, CPU) <= 2 * MIB + 64


def test_what_backward_needs_counts_and_views_do_not():
    inputs = torch.zeros(MIB // 4, requires_grad=True)

    def work():
        (inputs.view(-1, 2).transpose(0, 1).exp()).sum().backward()

    # exp keeps its result; backward makes its gradient and, for a moment, the product of the two.
    assert 2 * MIB <= peak_memory(work, CPU) <= 3 * MIB + 64


def test_what_an_operation_uses_within_itself_counts():
    @torch.library.custom_op("test_memory::wasteful", mutates_args=())
    def wasteful(given: torch.Tensor) -> torch.Tensor:
        return torch.zeros(MIB // 4).sum() + given

    given = torch.zeros(())
    assert MIB <= peak_memory(lambda: wasteful(given), CPU) <= MIB + 256


def test_counting_ends_where_the_work_fails():
    def work():
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            peak_memory(work, CPU)
