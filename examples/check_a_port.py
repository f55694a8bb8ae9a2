"""Check a port: which position method does other code compute, and how does it differ?

    whereformer check examples/check_a_port.py:like_gpt_j
    whereformer check examples/check_a_port.py:with_shaws_table

Each function returns scores before softmax. A function of query, key and value may return attention's output instead.
"""

import torch

import whereformer

METHODS = {
    name: whereformer.build_position(name, hidden_size=16, num_heads=2) for name in ("none", "rope", "t5", "shaw")
}
"""The methods to try. Those with parameters have the code's: here the code reads theirs."""


def like_gpt_j(query, key):
    """RoPE as GPT-J has it: features 0 and 1 are a pair, then 2 and 3."""
    return rotate(query) @ rotate(key).mT * query.shape[-1] ** -0.5


def rotate(x):
    """Rotate each pair of features by its angle."""
    angles = torch.arange(x.shape[2])[:, None] * 10_000 ** (-torch.arange(4, dtype=x.dtype) / 4)
    even, odd = x[..., ::2], x[..., 1::2]
    pairs = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    return torch.stack(pairs, -1).flatten(-2)


def with_shaws_table(query, key):
    """Shaw's scores, with a mistake: each offset reads the row of the next."""
    shaw = METHODS["shaw"]
    positions = torch.arange(query.shape[2])
    rows = (positions - positions[:, None] + 1).clamp(-shaw.clip, shaw.clip) + shaw.clip
    table = shaw.keys[0].detach().double()
    return (query @ key.mT + torch.einsum("bhid,ijd->bhij", query, table[rows])) * query.shape[-1] ** -0.5


def without_positions(query, key):
    """Plain scaled dot products."""
    return query @ key.mT * query.shape[-1] ** -0.5


def random(query, key):
    """Scores that no method computes."""
    return torch.randn(1, 2, 12, 12)
