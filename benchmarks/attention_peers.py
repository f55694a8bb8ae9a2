"""Other code for attention with positions that people use today, as ways to time next to this library's.

- ``t5:transformers``: T5's bias from transformers' own buckets, added to a full matrix of scores.
- ``shaw:tensor2tensor``: (n, n, head_dim) tensors of vectors, as in tensor2tensor.
- ``flex``: FlexAttention, compiled, with the table captured by its score_mod, or with a block mask for the window.
- ``eager``: soft caps and sinks by the formula in plain PyTorch, as in Hugging Face's models.
- ``repeated``: keys and values that heads share are repeated for each of them.
- ``padded``: sequences are padded to one length and taken out of the result again.

Buckets and indices, which don't depend on parameters, are computed before timing, because a model could keep them,
unless the library itself computes them in each forward. All ways get the same parameters as ours and must give the same
result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attention_kinds import SHAW_CLIP, SOFTCAP, WINDOW, BenchProblem, Packed
from attention_ways import Way, gather
from torch import Tensor

from whereformer import OffsetBias, attention

Compute = Callable[[], Tensor]


def scores_of(problem: BenchProblem) -> Tensor:
    """Return the full matrix of scores, as in Hugging Face's models."""
    return problem.query @ problem.key.transpose(-1, -2) * problem.case.head_dim**-0.5


def t5_transformers(problem: BenchProblem) -> Compute:
    from transformers.models.t5.modeling_t5 import T5Attention

    buckets = T5Attention._relative_position_bucket(problem.offsets(), True, 32, 128)

    def compute() -> Tensor:
        bias = gather(problem.parameters["weight"], buckets, problem.query.dtype)
        return (scores_of(problem) + bias).softmax(-1) @ problem.value

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
        assert isinstance(term, OffsetBias)
        table, first, last = term.table, term.first, term.table.shape[1] - 1

        def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + table[head, (key - query - first).clamp(0, last)]

        return compiled(problem.query, problem.key, problem.value, score_mod=score_mod)

    return compute


def eager_softcap(problem: BenchProblem) -> Compute:
    return lambda: ((scores_of(problem) / SOFTCAP).tanh() * SOFTCAP).softmax(-1) @ problem.value


def eager_sinks(problem: BenchProblem) -> Compute:
    def compute() -> Tensor:
        scores = scores_of(problem)
        sinks = problem.parameters["sinks"].to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ problem.value

    return compute


def repeated(problem: BenchProblem) -> Compute:
    sharing = problem.query.shape[1] // problem.key.shape[1]

    def compute() -> Tensor:
        key, value = (rows.repeat_interleave(sharing, 1) for rows in (problem.key, problem.value))
        return attention(problem.query, key, value, problem.terms)

    return compute


def padded(problem: BenchProblem) -> Compute:
    assert isinstance(problem, Packed)
    lengths = problem.starts.diff().unsqueeze(1)
    mask = torch.arange(problem.case.n, device=lengths.device) < lengths

    def pad(rows: Tensor) -> Tensor:
        batch = rows.new_zeros(*mask.shape, *rows.shape[1::2])
        batch[mask] = rows[0].transpose(0, 1)
        return batch.transpose(1, 2)

    def compute() -> Tensor:
        out = attention(pad(problem.query), pad(problem.key), pad(problem.value), problem.terms, key_mask=mask)
        return out.transpose(1, 2)[mask].transpose(0, 1).unsqueeze(0)

    return compute


PEERS = (
    Way("t5:transformers", t5_transformers, ("t5",)),
    Way("shaw:tensor2tensor", shaw_tensor2tensor, ("shaw",)),
    Way("flex", flex, ("bias", "t5", "tisa", "window")),
    Way("eager", eager_softcap, ("softcap",)),
    Way("eager", eager_sinks, ("sinks",)),
    Way("repeated", repeated, ("grouped",)),
    Way("padded", padded, ("varlen",)),
)
