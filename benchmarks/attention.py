"""Time attention with positions against what people use today. The README's speed figures come from this benchmark.

Run: make bench, or: .venv/bin/python benchmarks/attention.py --help

It measures like ``whereformer bench``, with more terms and lengths, and with these other ways:

- ``t5:transformers``: T5's bias from transformers' own buckets, added to a full matrix of scores.
- ``t5:x-transformers``: its RelativePositionBias and Attend; needs ``pip install x-transformers==2.31.10``.
- ``tisa:eager``: TISA's kernels as a bias for every pair, added to a full matrix of scores, as in the paper.
- ``shaw:tensor2tensor``: (n, n, head_dim) tensors of vectors, as in tensor2tensor.
- ``flex``: FlexAttention, compiled, with the table captured by its score_mod, or with a block mask for the window.
- ``repeated``: keys and values that heads share are repeated for each of them.
- ``padded``: sequences are padded to one length and taken out of the result again.

Its kinds of terms are those of the command and of attention_kinds.py. For soft caps and sinks, ``eager`` is the formula
in plain PyTorch, as Hugging Face's models have it.

What doesn't depend on parameters (buckets, indices) is computed before timing, because a model could keep it, unless
the library itself computes it in each forward. All ways get the same parameters as ours and must give the same result.

At the end, goals.md in the folder has a table of what was reached beside the goals for this processor, and plot.svg a
picture of it.
"""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from attention_kinds import MORE_WAYS, POSITIONS, SOFTCAP, WINDOW, Packed
from attention_plot import plot
from goals import write_goals
from torch import Tensor

from whereformer import attention
from whereformer.cli.ending import ending
from whereformer.cli.main import execute
from whereformer.files import write_atomically
from whereformer.lab.options import find_device
from whereformer.lab.provenance import machine
from whereformer.studies.bench.cases import SHAW_CLIP, BenchProblem, tisa_curve
from whereformer.studies.bench.results import BenchResults
from whereformer.studies.bench.run import BenchJob
from whereformer.studies.bench.settings import Bench
from whereformer.studies.bench.ways import Way, gather

Compute = Callable[[], Tensor]


def eager(problem: BenchProblem, bias: Tensor) -> Tensor:
    """Attention with a full matrix of scores, as in Hugging Face's models."""
    scores = problem.query @ problem.key.transpose(-1, -2) * problem.case.head_dim**-0.5 + bias
    return scores.softmax(-1) @ problem.value


def t5_transformers(problem: BenchProblem) -> Compute:
    from transformers.models.t5.modeling_t5 import T5Attention

    buckets = T5Attention._relative_position_bucket(problem.offsets(), True, 32, 128)
    return lambda: eager(problem, gather(problem.parameters["weight"], buckets, problem.query.dtype))


def t5_x_transformers(problem: BenchProblem) -> Compute:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it scripts functions, which is deprecated in torch
        from x_transformers.attend import Attend
        from x_transformers.x_transformers import RelativePositionBias

    module = RelativePositionBias(1, causal=False, num_buckets=32, max_distance=128, heads=problem.case.heads)
    module.to(problem.query.device)
    attend = Attend(heads=problem.case.heads, flash=False)

    def compute() -> Tensor:
        weight = {"relative_attention_bias.weight": problem.parameters["weight"].t()}
        bias = torch.func.functional_call(module, weight, (problem.case.n, problem.case.n))
        out, _ = attend(problem.query, problem.key, problem.value, attn_bias=bias.to(problem.query.dtype))
        return out

    return compute


def tisa_eager(problem: BenchProblem) -> Compute:
    columns = problem.offsets() + problem.case.n - 1

    def compute() -> Tensor:
        curve = tisa_curve(problem.parameters, problem.case.n - 1)
        return eager(problem, gather(curve, columns, problem.query.dtype))

    return compute


def shaw_tensor2tensor(problem: BenchProblem) -> Compute:
    columns = problem.offsets().clamp(-SHAW_CLIP, SHAW_CLIP) + SHAW_CLIP
    query, key, value, case = problem.query, problem.key, problem.value, problem.case

    def by_row(rows: Tensor, vectors: Tensor) -> Tensor:
        """``_relative_attention_inner``: one product per query, over batch and heads at once."""
        flat = rows.permute(2, 0, 1, 3).reshape(case.n, case.batch * case.heads, -1)
        return (flat @ vectors).view(case.n, case.batch, case.heads, -1).permute(1, 2, 0, 3)

    def compute() -> Tensor:
        keys, values = (gather(problem.parameters[name], columns, query.dtype)[0] for name in ("keys", "values"))
        scores = (query @ key.transpose(-1, -2) + by_row(query, keys.transpose(-1, -2))) * case.head_dim**-0.5
        weights = scores.softmax(-1)
        return weights @ value + by_row(weights, values)

    return compute


def flex(problem: BenchProblem) -> Compute:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # else each length counts as a recompilation, and after eight nothing is compiled
    compiled = torch.compile(flex_attention, dynamic=False)
    if problem.case.terms == "window":
        n = problem.case.n
        near = create_block_mask(lambda b, h, q, k: (k - q).abs() <= WINDOW, None, None, n, n, problem.query.device)
        return lambda: compiled(problem.query, problem.key, problem.value, block_mask=near)

    def compute() -> Tensor:
        (term,) = problem.terms
        table, first, last = term.table, term.first, term.table.shape[1] - 1

        def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + table[head, (key - query - first).clamp(0, last)]

        return compiled(problem.query, problem.key, problem.value, score_mod=score_mod)

    return compute


def eager_softcap(problem: BenchProblem) -> Compute:
    def compute() -> Tensor:
        scores = problem.query @ problem.key.transpose(-1, -2) * problem.case.head_dim**-0.5
        return ((scores / SOFTCAP).tanh() * SOFTCAP).softmax(-1) @ problem.value

    return compute


def eager_sinks(problem: BenchProblem) -> Compute:
    def compute() -> Tensor:
        scores = problem.query @ problem.key.transpose(-1, -2) * problem.case.head_dim**-0.5
        sinks = problem.parameters["sinks"].to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ problem.value

    return compute


def repeated(problem: BenchProblem) -> Compute:
    sharing = problem.query.shape[1] // problem.key.shape[1]

    def compute() -> Tensor:
        key, value = (rows.repeat_interleave(sharing, 1) for rows in (problem.key, problem.value))
        return attention(problem.query, key, value, problem.terms)

    return compute


def padded(problem: Packed) -> Compute:
    lengths = problem.starts.diff().unsqueeze(1)
    mask = torch.arange(problem.case.n, device=lengths.device) < lengths

    def compute() -> Tensor:
        content = []
        for rows in (problem.query, problem.key, problem.value):
            batch = rows.new_zeros(*mask.shape, *rows.shape[1::2])
            batch[mask] = rows[0].transpose(0, 1)
            content.append(batch.transpose(1, 2))
        found = attention(*content, problem.terms, key_mask=mask)
        return found.transpose(1, 2)[mask].transpose(0, 1).unsqueeze(0)

    return compute


def eager_bias(problem: BenchProblem) -> Compute:
    columns = problem.offsets() + problem.case.n - 1
    return lambda: eager(problem, gather(problem.parameters["table"], columns, problem.query.dtype))


PEERS = (
    Way("eager", eager_bias, ("bias",)),
    Way("t5:transformers", t5_transformers, ("t5",)),
    Way("t5:x-transformers", t5_x_transformers, ("t5",)),
    Way("tisa:eager", tisa_eager, ("tisa",)),
    Way("shaw:tensor2tensor", shaw_tensor2tensor, ("shaw",)),
    Way("flex", flex, ("bias", "t5", "tisa", "window")),
    Way("eager", eager_softcap, ("softcap",)),
    Way("eager", eager_sinks, ("sinks",)),
    Way("repeated", repeated, ("grouped",)),
    Way("padded", padded, ("varlen",)),
)


@dataclass(frozen=True, kw_only=True)
class Full(Bench):
    """Time attention with positions in whereformer and in what people use today, relative to attention without them.

    Everything takes hours on one core. You can measure in parts, because each run adds to the folder: --lengths 128,512
    first, then --lengths 2048 --no-peers.
    """

    terms: Annotated[str | None, tyro.conf.arg(metavar="A,B,C")] = POSITIONS
    """What positions add; see whereformer bench --help. Also dense (a number per pair), funnel (a bias where only every
    second token is a query), and what attention offers besides: window (128 tokens on each side), grouped (four heads
    share keys), lse, softcap, sinks and varlen (different lengths without padding)."""

    lengths: Annotated[str | None, tyro.conf.arg(metavar="N,N")] = "128,512,2048"
    """Tokens in a sequence."""

    dtypes: Annotated[str | None, tyro.conf.arg(metavar="A,B")] = "float32,bfloat16"
    """float32, bfloat16 or float16."""

    backends: str = "auto,blockwise"
    """Backends of whereformer.attention: "auto" chooses one for each call, "blockwise" needs no compiler."""

    peers: bool = True
    """Whether to measure other libraries too."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Folder for the results. Default: a folder in benchmarks/results/ named after the machine."""

    def job(self) -> BenchJob:
        job = super().job()
        return replace(job, ways=[*job.ways, *MORE_WAYS, *(PEERS if self.peers else ())])


def folder_of(facts: dict[str, Any]) -> Path:
    """Return the folder for a machine's results."""
    name = facts.get("gpu") or f"{facts['cpu']} {os.cpu_count()} cores {facts['instructions']}"
    return Path(__file__).parent / "results" / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    full = tyro.cli(Full, args=sys.argv[1:])
    with ending(full):
        full = replace(full, out=full.out or folder_of(machine(find_device(full.device))))
    execute(full)
    measured = BenchResults.load(full.out).rows
    for file, picture in plot(measured).items():
        write_atomically(full.out / file, picture)
    print(write_goals(measured, full.out / "goals.md"))
