"""What Triton's kernels compile to, without a GPU, with the version of Triton that is installed.

``make test-tritons`` runs these tests with the oldest, the usual and the newest version.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
triton = pytest.importorskip("triton")
if not (Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm").exists():
    pytest.skip("needs the disassembler in Triton's package", allow_module_level=True)


ANSWERING = """
import json, sys, traceback
import gpu_static as g
for expression in sys.stdin:
    try:
        answer = [eval(expression), None]
    except Exception:
        answer = [None, traceback.format_exc()]
    print("answer", json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def ask():
    """A function that says what an expression is in ``gpu_static``, in a process where Triton does not interpret.

    The process is the same for all expressions: imports take longer than most answers.
    """
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"  # the default from Triton 3.10 on; launches ask for what they need
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", ANSWERING], env=environment, **pipes) as process:

        def answer(expression):
            print(expression, file=process.stdin, flush=True)
            line = next((line for line in process.stdout if line.startswith("answer ")), None)
            assert line, "the process ended"
            value, error = json.loads(line.removeprefix("answer "))
            assert error is None, error
            return value

        yield answer
        process.stdin.close()


@pytest.mark.parametrize("gpu", [80, pytest.param(90, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "term", ["bias", *(pytest.param(term, marks=pytest.mark.slow) for term in ("plain", "t5", "window", "packed"))]
)
def test_the_backward_pass_compiles(gpu, term, ask):
    """A bias adds two kernels to those of any call, and nothing to what these do, but for sums beyond its ends."""
    kernels = ask(f"[counts.kernel for counts in g.count({gpu}, 64, 'bfloat16', {term!r})]")
    of_bias = set() if term == "plain" else {"diagonals", "finish_bias"}
    assert set(kernels) == {"forward", "prepare", "query_gradients", "key_gradients"} | of_bias


def test_products_and_sums_are_fused(ask):
    """As fused, a product is not rounded before it is added, and takes no instruction of its own."""
    kernels = f"g.compiled_for(80, 64, 'bfloat16', 'plain', {['prepare', 'forward']})"
    assert ask(f"[kernel.metadata.enable_fp_fusion for kernel, _ in {kernels}]") == [True, True]


# The kernels whose tiles depend on the width of tables alone, which a GPU of 99 KiB has to hold; and all others.
OF_TABLES = ["products", "table_gradients"]


@pytest.mark.parametrize("kernels", [OF_TABLES, pytest.param([], marks=pytest.mark.slow)])
@pytest.mark.parametrize("dim", [128, 256])
def test_kernels_for_wide_tables_of_vectors_fit_into_shared_memory(dim, kernels, ask):
    counts = f"g.count(89, {dim}, 'bfloat16', 'shaw', {kernels})"
    sizes = ask(f"[(count.kernel, count.programs, count.shared) for count in {counts}]")
    assert {name for name, _, _ in sizes} >= {*OF_TABLES}
    assert all(programs > 0 and shared <= 99 * 1024 for _, programs, shared in sizes), sizes


BEYOND = [*range(129, 161), 200, 256, 1000]
LENGTHS = {
    "plain": [*range(1, 41), *BEYOND],
    "bias": [*range(1, 41), 100, 250, 256],
    "t5": BEYOND,
    "shaw": BEYOND,
    "window": BEYOND,
}


@pytest.mark.parametrize("term", LENGTHS)
def test_a_kernel_is_compiled_at_most_three_times(term, ask):
    """For any lengths beyond the ends of tables: of 1, divisible by 16, and others."""
    assert max(ask(f"g.compilations(90, {term!r}, {LENGTHS[term]})").values()) <= 3


def test_a_part_of_the_check_on_a_gpu_needs_no_more_than_torch_and_triton():
    """And pytest and NumPy, which a bare GPU machine has."""
    program = """
import sys
for name in ("beartype", "rich", "hypothesis", "jaxtyping", "transformers", "scipy"):
    sys.modules[name] = None
import gpu_static, gpu_check, tests.conftest, tests.kernels.test_triton
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
