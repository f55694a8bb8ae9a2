"""What people use for attention with positions today, as ways to time beside this library's.

- ``t5:transformers``: T5's bias from transformers' own buckets, added to a full matrix of scores.
- ``t5:x-transformers``: its RelativePositionBias and Attend; needs ``pip install x-transformers==2.31.10``.
- ``tisa:eager``: TISA's kernels as a bias for every pair, added to a full matrix of scores, as in the paper.
- ``shaw:tensor2tensor``: (n, n, head_dim) tensors of vectors, as in tensor2tensor.
- ``flex``: FlexAttention, compiled, with the table captured by its score_mod, or with a block mask for the window.
- ``eager``: a bias, soft caps and sinks by the formula in plain PyTorch, as Hugging Face's models have it.
- ``repeated``: keys and values that heads share are repeated for each of them.
- ``padded``: sequences are padded to one length and taken out of the result again.

What doesn't depend on parameters (buckets, indices) is computed before timing, because a model could keep it, unless
the library itself computes it in each forward. All ways get the same parameters as ours and must give the same result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attention_kinds import SHAW_CLIP, SOFTCAP, WINDOW, BenchProblem, Packed, tisa_curve
from attention_ways import Way, gather
from torch import Tensor

from whereformer import OffsetBias, attention

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
        assert isinstance(term, OffsetBias)
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


def padded(problem: BenchProblem) -> Compute:
    assert isinstance(problem, Packed)
    lengths = problem.starts.diff().unsqueeze(1)
    mask = torch.arange(problem.case.n, device=lengths.device) < lengths

    def pad(rows: Tensor) -> Tensor:
        batch = rows.new_zeros(*mask.shape, *rows.shape[1::2])
        batch[mask] = rows[0].transpose(0, 1)
        return batch.transpose(1, 2)

    def compute() -> Tensor:
        found = attention(pad(problem.query), pad(problem.key), pad(problem.value), problem.terms, key_mask=mask)
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
