"""Plans of any backend. Those of Triton are tested on an emulated GPU, in the folder ``card``."""

import torch

from whereformer.kernels.call import make_call
from whereformer.kernels.operators import Backend, Given, Plan


class Counting(Backend):
    """Its results are those of no attention; ``usable`` says whether what it recorded may be used."""

    name, usable, computed = "counting", True, 0

    def again(self, *tensors):
        return tensors if self.usable else None

    def forward(self, call, tensors):
        self.computed += 1
        return tensors, self.again

    def backward(self, call, given, needed, tensors):
        self.computed += 1
        return tensors, self.again


def test_what_must_not_be_used_is_computed_anew_and_few_plans_are_kept():
    rows, backend = torch.randn(3, 1, 2, 4, 16).unbind(), Counting()
    kind = Plan(make_call(*rows), backend)
    given = Given(rows[0], None, rows[1], rows[2])
    for usable, computed in ((True, 2), (True, 2), (False, 4), (False, 6), (True, 6)):
        backend.usable = usable
        assert all(map(torch.equal, kind.forward(rows), rows))
        assert all(map(torch.equal, kind.backward(rows, [True] * 3, given), [*rows, *given[:1], *given[2:]]))
        assert backend.computed == computed
    for stride in range(16, 40):
        d_output = torch.empty(8 * stride).as_strided((1, 2, 4, 16), (8 * stride, 4 * stride, stride, 1))
        kind.backward(rows, [True] * 3, given._replace(d_output=d_output))
    assert len(kind._backwards.values) == 8
