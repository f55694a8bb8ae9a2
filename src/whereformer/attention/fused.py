"""Calls without terms: position acted on the embeddings or on query and key, so torch's own attention runs them."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from .call import Call
from .sizes import holds


def supports(call: Call) -> bool:
    """Whether the call is plain content attention."""
    return len(call.terms) == 0 and call.query is not None


def attend(call: Call) -> Tensor:
    """The attention output, by ``scaled_dot_product_attention``; rows that may attend nothing give zeros."""
    assert call.query is not None
    assert call.key is not None
    # torch's own causal flag aligns queries to the left and so fits only the square default.
    plain_causal = (
        call.causal
        and call.default_positions
        and holds(call.n_q == call.n_k)
        and call.key_mask is None
        and call.query_documents is None
    )
    allowed = None if plain_causal else call.allowed()
    out = functional.scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        attn_mask=allowed,
        dropout_p=call.dropout_p,
        is_causal=plain_causal,
        scale=call.scale,
    )
    return out if allowed is None else out.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
