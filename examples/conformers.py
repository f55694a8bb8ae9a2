"""Relative attention of ESPnet, NeMo and SpeechBrain without a matrix of all pairs of frames: hours of speech fit.

Their conformers share the attention of Transformer-XL, ``(q + u) . k + (q + v) . p``, and compute it as a matrix that
is shifted (``rel_shift``). ``replace(model)`` changes the forward of these modules, and nothing else: a state dict has
the same names, and the results are the same: ESPnet 202511, NeMo 3.0.0 and SpeechBrain 1.1.2 differ by at most 2e-14 in
float64, and gradients by 4e-13, padded, in chunks and streaming. The toolkits are not needed here: a module with the
name and the parameters of ESPnet's takes its place.

    python examples/conformers.py             # a minute of speech, at 40 ms a frame
    python examples/conformers.py 30          # half an hour: 45,000 frames
    python examples/conformers.py 5 matrix    # five minutes with the usual forward, a matrix of all pairs
"""

import copy
import math
import resource
import sys
import time
from types import MethodType

import torch
from torch import nn

from whereformer import DenseBias, OffsetKeys, attention
from whereformer.provenance import provenance


def relative_attention(query, key, value, vectors, u, v, scale, visible=None, dropout_p=0.0):
    """Attention with ``scale * ((q + u) . k + (q + v) . p)``; the last query is at the last key.

    Args:
        query, key, value: (batch, heads, n_q or n_k, head_dim) each.
        vectors: p by offset, (heads, 2 * n_k - 1, head_dim), from ``n_k - 1`` frames before to ``n_k - 1`` after.
        u, v: (heads, 1, head_dim).
        visible: True = attend; (batch, 1, n_k), or (batch, n_q, n_k). A matrix that only hides padding is read as such;
            any other costs a bias for each pair.
    """
    if vectors.shape[1] != 2 * key.shape[2] - 1:
        raise ValueError(f"expected 2 * {key.shape[2]} - 1 rows of positions for the keys, got {vectors.shape[1]}")
    terms, options = [OffsetKeys(vectors, -(vectors.shape[1] // 2), query_factors=(query + v) * scale)], {}
    if visible is not None:
        rows, columns = visible.any(2), visible.any(1)
        if bool((visible == rows[:, :, None] & columns[:, None]).all()):
            # A frame of padding sees no frame, and no frame sees it.
            options = {"key_documents": torch.where(columns, 0, 1)}
            options["query_documents"] = torch.where(rows.expand(-1, query.shape[2]), 0, 2)
        else:
            terms.append(DenseBias(torch.where(visible[:, None], 0.0, -math.inf).to(query.dtype)))
    return attention(query + u, key, value, terms, scale=scale, dropout_p=dropout_p, **options)


def split(states, heads):
    """(batch, n, hidden_size) as (batch, heads, n, head_dim)."""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def join(states):
    """The reverse of ``split``."""
    return states.transpose(1, 2).flatten(2)


def espnet(self, query, key, value, pos_emb, mask):
    """ESPnet's RelPositionMultiHeadedAttention; a mask of 1 = attend, (batch, 1 or n_q, n_k)."""
    query, key, value = self.linear_q(query), self.linear_k(key), self.linear_v(value)
    u, v = self.pos_bias_u[:, None], self.pos_bias_v[:, None]
    vectors = split(self.linear_pos(pos_emb[:1]), self.h)[0]
    content = [split(states, self.h) for states in (query, key, value)]
    dropout_p = self.dropout.p if self.training else 0.0
    visible = None if mask is None else mask.bool()
    return self.linear_out(join(relative_attention(*content, vectors, u, v, self.d_k**-0.5, visible, dropout_p)))


def nemo(self, query, key, value, mask, pos_emb, cache=None):
    """NeMo's RelPositionMultiHeadAttention; a mask of True = hidden. A cache of frames makes it stream."""
    key, value, query, cache = self.update_cache(key=key, value=value, query=query, cache=cache)
    out = espnet(self, query, key, value, pos_emb, None if mask is None else ~mask)
    return out if cache is None else (out, cache)


def speechbrain(self, query, key, value, pos_embs, key_padding_mask=None, attn_mask=None, return_attn_weights=True):
    """SpeechBrain's RelPosMHAXL in self-attention; True = hidden. There are no weights to return: None."""
    if not torch.equal(query, key) or not torch.equal(key, value) or self.mask_pos_future or self.vbias is not None:
        raise NotImplementedError("only self-attention without mask_pos_future and vbias")
    content = split(nn.functional.linear(query, self.in_proj_weight), self.num_heads).chunk(3, -1)
    u, v = (bias.view(self.num_heads, 1, -1) for bias in (self.pos_bias_u, self.pos_bias_v))
    visible = None if key_padding_mask is None else ~key_padding_mask[:, None].bool()
    if attn_mask is not None:
        visible = ~attn_mask.bool() if visible is None else visible & ~attn_mask.bool()
        visible = visible.expand(len(query), -1, -1)
    vectors = split(self.linear_pos(pos_embs), self.num_heads)[0]
    dropout_p = self.dropout_att.p if self.training else 0.0
    out = self.out_proj(join(relative_attention(*content, vectors, u, v, self.scale, visible, dropout_p)))
    return (out, None) if return_attn_weights else out


FORWARDS = {
    "RelPositionMultiHeadedAttention": espnet,
    "RelPositionMultiHeadAttention": nemo,
    "RelPosMHAXL": speechbrain,
}
"""The forward of each class, by its name."""


def replace(model):
    """Give every module of these classes the forward above; return how many there are."""
    modules = [module for module in model.modules() if type(module).__name__ in FORWARDS]
    for module in modules:
        module.forward = MethodType(FORWARDS[type(module).__name__], module)
    return len(modules)


class RelPositionMultiHeadedAttention(nn.Module):
    """What ESPnet's module has, with the usual forward: a matrix of the products with all vectors, shifted."""

    def __init__(self, n_head, n_feat):
        super().__init__()
        self.h, self.d_k = n_head, n_feat // n_head
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (nn.Linear(n_feat, n_feat) for _ in range(4))
        self.linear_pos = nn.Linear(n_feat, n_feat, bias=False)
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.randn(n_head, self.d_k)) for _ in range(2))
        self.dropout = nn.Dropout(0.0)

    def forward(self, query, key, value, pos_emb, mask):
        """Attention as in the paper, each score from the vector at its offset."""
        query, key, value, vectors = (
            split(states, self.h)
            for states in (self.linear_q(query), self.linear_k(key), self.linear_v(value), self.linear_pos(pos_emb))
        )
        n_q, n_k = query.shape[2], key.shape[2]
        offsets = torch.arange(n_k) - torch.arange(n_k - n_q, n_k)[:, None]
        by_offset = (query + self.pos_bias_v[:, None]) @ vectors.mT
        shifted = by_offset.gather(3, (offsets + vectors.shape[2] // 2).expand(*query.shape[:2], -1, -1))
        scores = ((query + self.pos_bias_u[:, None]) @ key.mT + shifted) * self.d_k**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask.bool()[:, None], -math.inf)
        return self.linear_out(join(scores.softmax(-1).nan_to_num(0.0) @ value))


def sinusoids(frames, width):
    """Vectors of the distances from ``frames - 1`` before to as many after, (1, 2 * frames - 1, width)."""
    angles = torch.arange(frames - 1, -frames, -1)[:, None] * 10_000 ** (-torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[None]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layer = RelPositionMultiHeadedAttention(2, 64)
    usual = copy.deepcopy(layer)
    speech = torch.randn(2, 500, 64)
    mask = torch.arange(500) < torch.tensor([[[500]], [[300]]])  # the second is padded
    expected = layer(speech, speech, speech, sinusoids(500, 64), mask)
    names = list(layer.state_dict())
    print("replaced modules:", replace(layer))
    difference = (layer(speech, speech, speech, sinusoids(500, 64), mask) - expected)[mask[:, 0]].abs().max()
    print(f"20 seconds, padded: differ from the formula by at most {difference:.1e}")
    print("the state dict has the same names:", list(layer.state_dict()) == names)

    frames = round(1500 * float(sys.argv[1] if len(sys.argv) > 1 else 1))
    measured = usual if "matrix" in sys.argv[2:] else layer
    speech, positions = torch.randn(1, frames, 64), sinusoids(frames, 64)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    measured(speech, speech, speech, positions, None).square().mean().backward()
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{frames:,} frames, forward and backward: {time.process_time() - started:.1f} s, {added:,.0f} MiB")
    print(f"a single matrix of pairs for both heads: {2 * frames**2 * 4 / 2**20:,.0f} MiB")
    source = provenance()
    print(f"commit {source['commit']}, {source['machine']['cpu']}, {source['machine']['instructions']}, one thread")
