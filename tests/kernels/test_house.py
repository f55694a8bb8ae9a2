"""What a reader meets: how many files a new term touches, and how often a call passes from file to file."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import whereformer
from tests.kernels.cases import HEADS, content, need_native, random
from whereformer import OffsetBias, attention
from whereformer.kernels import remember

PACKAGE = Path(whereformer.__file__).parent

# A term with a number for each key, which is added to all its scores: what is replaced in each file, and by what.
NEW_TERM = {
    "terms.py": {
        "Term: TypeAlias = OffsetBias": """@dataclass(frozen=True, eq=False)
class KeyBias(_Described):
    numbers: Float[Tensor, "#batch heads n_k"]

    @property
    def axes(self) -> dict[str, str]:
        return {"numbers": "items heads n_k"}


Term: TypeAlias = KeyBias | OffsetBias""",
    },
    "merge.py": {
        "from .terms import ": "from .terms import KeyBias, ",
        "    return {\n": """    numbers = [term.numbers.unsqueeze(-1) for term in terms if isinstance(term, KeyBias)]
    return {
        "key_bias": _join(numbers, dtype),
""",
    },
    "fields.py": {
        "    key_mask: Ann": """    key_bias: Annotated[Tensor | None, Axes("items heads n_k biases", "wide", True)]
    key_mask: Ann""",
    },
    "reference.py": {
        "    if call.dense is not None:\n": """    if call.key_bias is not None:
        scores = scores + call.key_bias.sum(-1).unsqueeze(-2)
    if call.dense is not None:
""",
    },
    "__init__.py": {"from .terms import (\n": "from .terms import (\n    KeyBias as KeyBias,\n"},
}

USED = """
import pytest, torch
from whereformer import DenseBias, attention, explain
from whereformer.kernels import KeyBias, triton

torch.manual_seed(0)
inputs = [torch.randn(2, 3, n, 16, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7)]
numbers = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
d_out = torch.randn(2, 3, 5, 16, dtype=torch.float64)

def results(term, backend):
    out = attention(*inputs, [term, term], causal=True, backend=backend)
    return out, *torch.autograd.grad(out, [*inputs, numbers], d_out)

wanted = results(DenseBias(numbers[:, :, None, :].expand(-1, -1, 5, -1)), "reference")
for backend in ("reference", "blockwise", "auto"):
    torch.testing.assert_close(results(KeyBias(numbers), backend), wanted)
assert explain(*inputs, [KeyBias(numbers)]).backend == "blockwise"
with pytest.raises(ValueError, match="backend: 'native' knows no key_bias; use backend='blockwise'"):
    attention(*inputs, [KeyBias(numbers)], backend="native")
assert "key_bias" not in triton.backend.inputs
with pytest.raises(ValueError, match="KeyBias.numbers: expected shape"):
    attention(*inputs, [KeyBias(numbers.mT)])
"""


def test_a_new_term_touches_five_files(tmp_path):
    """Then the reference and blockwise compute it, with gradients, and backends that do not know it refuse it."""
    need_native()
    shutil.copytree(PACKAGE, tmp_path / "whereformer", ignore=shutil.ignore_patterns("__pycache__"))
    for name, places in NEW_TERM.items():
        file = tmp_path / "whereformer" / "kernels" / name
        text = file.read_text(encoding="utf-8")
        for before, now in places.items():
            assert text.count(before) == 1
            text = text.replace(before, now)
        file.write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", USED], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(NEW_TERM) == 5


def test_a_call_passes_from_file_to_file_31_times():
    """The first call of its kind, with a bias, by the compiled kernel. The watch over torch does not count."""
    need_native()
    remember(True)
    passes = []

    def look(frame, event, argument):
        caller = frame.f_back
        while caller is not None and str(PACKAGE) not in caller.f_code.co_filename:
            caller = caller.f_back  # code that Python or torch runs in between, such as a dataclass's __init__
        name, of_caller = frame.f_code.co_filename, caller and caller.f_code.co_filename
        watches = frame.f_code.co_name == "__torch_function__"
        if event == "call" and str(PACKAGE) in name and name != of_caller and not watches:
            passes.append((of_caller, name, frame.f_code.co_name))

    given = [*content(11, 13), [OffsetBias(random(HEADS, 9), -4)]]
    sys.setprofile(look)
    try:
        attention(*given, backend="native")
    finally:
        sys.setprofile(None)
    assert 0 < len(passes) <= 31, passes
