"""Peak memory is counted exactly."""

import torch

from whereformer.tasks.memory import peak_memory

CPU = torch.device("cpu")
MIB = 2**20


def test_only_what_lives_at_once_counts():
    def work():
        first = torch.zeros(MIB // 4)
        second = first + 1
        del first
        third = second * 2
        del second, third

    assert peak_memory(work, CPU) == 2 * MIB


def test_what_backward_needs_counts_and_views_do_not():
    inputs = torch.zeros(MIB // 4, requires_grad=True)

    def work():
        (inputs.view(-1, 2).transpose(0, 1).exp()).sum().backward()

    # exp keeps its result; backward makes its gradient and, for a moment, the product of the two.
    assert 2 * MIB <= peak_memory(work, CPU) <= 3 * MIB + 64
