"""Writes docs/methods/support.md: what each position method can do on which device, measured by this script.

Run: python docs/_ext/support.py [METHOD ...]

It takes some minutes. With names it measures only their rows; the others stay as they are in the page.
"""

import json
import re
import sys
from pathlib import Path

import torch
from tables import as_table
from torch.export import Dim
from torch.onnx import OnnxExporterError

from whereformer import EncoderConfig, EncoderForMaskedLM, Positions, Site, build_position, explain, position_names
from whereformer.kernels.backend_choice import choose_backend
from whereformer.kernels.make_call import make_call
from whereformer.positions import method_class

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "methods" / "support.md"
MEASURED = ROOT / "benchmarks" / "results" / "amd-epyc-2-cores" / "properties.json"
SIZES = {"hidden_size": 32, "num_heads": 2, "num_layers": 2, "max_length": 512}
QUICK = {"floater": {"substeps": 1}}
"""Options with which a method only takes less time."""

HEAD = """\
# What each method can do, and where

`python docs/_ext/support.py` measured this page, with the default options of each method.

{table}

compiles
: `torch.compile(fullgraph=True)` takes attention with the method as one graph, which gives the same output.

exports
: `torch.export.export` and `torch.onnx.export` [make a program](../guides/export.md) of a model with the method, which
  gives the same outputs at other batches and lengths: any length, or as far as `max_length`.

O(n)
: the memory that a training step keeps for its backward pass grows with the number of tokens, not with its square,
  where positions are `Positions` (0, 1, 2, …) and where they are tensors (packed documents, for example).
  Attention itself is O(n) with every method.

repeats
: the output and all gradients are the same bits from run to run, on the CPU. On a GPU, Triton's kernels add in the same
  order from run to run, too ([why](../architecture/decisions.md#gradients-are-deterministic)).

CPU, GPU
: the backend that `auto` takes there ([all backends](../architecture/speed.md)). "triton" needs an NVIDIA GPU of
  compute capability 8.0; on others and on older ones, "blockwise" does the same in plain PyTorch. "sdpa" is torch's
  own attention.

longer text
: whether positions of `max_length` and above are accepted, and, where it was
  [measured](../results/properties.md), how much the loss of a trained model rose at four times the trained length.
"""


def call_of(position, length, explicit=False):
    """The arguments of attention around a method, and everything that has a gradient."""
    torch.manual_seed(0)
    at = torch.arange(length) if explicit else Positions(0, 1, length)
    hidden = torch.randn(1, length, 32, requires_grad=True)
    query, key, value = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
    embedded = position.embed(hidden, at)
    site = position.with_shared(Site(at, at))
    return (embedded, query, key, value, site), (hidden, query, key, value, *position.parameters())


def kept(position, length, explicit):
    """The bytes that a step keeps for its backward, each storage once."""
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        given, _ = call_of(position, length, explicit)
        position.attend(*given).sum()
    own = {tensor.untyped_storage().data_ptr() for tensor in position.parameters()}
    return sum(size for address, size in sizes.items() if address not in own)


def is_linear(position, explicit):
    """Whether twice the tokens keep at most about twice as much."""
    prepared, twice = (kept(position, length, explicit) for length in (256, 512))
    return twice < 2.5 * prepared


def repeats(position):
    """Whether output and gradients are the same bits, twice."""
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            given, leaves = call_of(position, 200)
            out = position.attend(*given)
            (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
            runs.append([out, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
            for leaf in leaves:
                leaf.grad = None
    finally:
        torch.use_deterministic_algorithms(False)
    return all(map(torch.equal, *runs))


def backends(position):
    """The backends of "auto" on the CPU and on a GPU."""
    given, _ = call_of(position, 128)
    query, key, value, terms = position.apply_hooks(*given)
    options = given[-1].options(query)
    call = make_call(query, key, value, terms, **options)
    return explain(query, key, value, terms, **options).backend, choose_backend(call, "auto", torch.device("cuda"))


def compiles(position):
    """Whether attention with the method is one graph with the right numbers."""
    given, _ = call_of(position, 12)
    torch.compiler.reset()
    try:
        out = torch.compile(position.attend, fullgraph=True, backend="aot_eager")(*given)
    except torch._dynamo.exc.TorchDynamoException:
        return False
    return torch.allclose(out, position.attend(*given), atol=1e-5)


def exports(name):
    """How far exported programs go."""
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=50,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=32,
        blocks="2",
        position=name,
        position_options=QUICK.get(name, {}),
        max_position_embeddings=40,
        type_vocab_size=0,
    )
    model = EncoderForMaskedLM(config).eval()
    ids = torch.randint(50, (2, 24))
    other = torch.randint(50, (3, 17))
    program = torch.export.export(model, (ids,), dynamic_shapes=[{0: Dim.DYNAMIC, 1: Dim.DYNAMIC}], strict=False)
    assert torch.allclose(program.module()(other).logits, model(other).logits, atol=1e-5)
    length = program.graph_module.graph.find_nodes(op="placeholder")[-1].meta["val"].shape[1].node.expr
    found = "max_length" if program.range_constraints[length].upper <= 40 else "any length"
    try:
        onnx = torch.onnx.export(model, (ids,), dynamo=True, dynamic_shapes=[{0: "batch", 1: "length"}], verbose=False)
    except OnnxExporterError:
        return f"{found}, no ONNX"
    assert onnx is not None
    assert torch.allclose(onnx(other)[0], model(other).logits, atol=1e-5)
    return found


def longer(name):
    """Whether longer text is accepted, and how the loss rises."""
    if not method_class(name).extrapolates:
        return "no"
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["table"].get(name)
    return "yes" if measured is None else f"yes, {measured['inductive']['number']}"


def row(name):
    """A method's row of the table."""
    torch.manual_seed(0)
    position = build_position(name, **SIZES, **QUICK.get(name, {}))
    marks = {True: "yes", False: "no"}
    linear = [is_linear(position, explicit) for explicit in (False, True)]
    memory = "yes" if all(linear) else "no" if not linear[0] else "not with tensors"
    cells = [marks[compiles(position)], exports(name), memory, marks[repeats(position)]]
    label = f"`{name}`" if name == "none" else f"[`{name}`]({name}.md)"
    found = [label, *cells, *backends(position), longer(name)]
    print(*found, file=sys.stderr, flush=True)
    return found


def table(names):
    """The table: the rows of these methods, measured now, and the page's rows of the others."""
    columns = ["method", "compiles", "exports", "O(n)", "repeats", "CPU", "GPU", "longer text"]
    header, dashes, *measured = as_table(columns, [row(name) for name in names])
    rows: dict[str, str] = {}
    for line in (*measured, *PAGE.read_text(encoding="utf-8").splitlines()):
        if found := re.match(r"\| \[?`(\w+)`", line):
            rows.setdefault(found[1], line)
    return "\n".join([header, dashes, *(rows[name] for name in position_names() if name in rows)])


if __name__ == "__main__":
    PAGE.write_text(HEAD.format(table=table(sys.argv[1:] or position_names())), encoding="utf-8")
