"""The "sdpa" backend: torch's own attention, for calls without terms (the method acts on embeddings, or on query and
key): ``softmax(scale * query @ key^T) @ value`` over the allowed pairs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from .call import Call, CallTemplate
from .terms import causal_diagonal
from .tracing import is_known_true, is_plain


class SdpaPlan(CallTemplate):
    """Computes calls that differ only in their tensors by torch's own attention."""

    def attend(self, tensors: Sequence[Tensor]) -> tuple[Tensor, None]:
        return attend(self.with_tensors(tensors)), None


def attend(call: Call) -> Tensor:
    """Compute attention by ``scaled_dot_product_attention``; a row without an allowed pair is zeros."""
    query, key, value, n_q, n_k = call.query, call.key, call.value, call.n_q, call.n_k
    assert query is not None
    assert key is not None
    if call.key_mask is None and call.query_documents is None:
        if not call.limits_offsets:
            return _attend(call, query, key, value)
        # torch masks before it multiplies by the scale, so only a positive scale preserves -inf.
        diagonal = causal_diagonal(*call.positions()) if call.scale > 0 else None
        if diagonal is not None and is_known_true(diagonal == 0):
            # torch's own flag aligns queries to the left.
            return _attend(call, query, key, value, causal=True)
        if diagonal is not None and query.device.type != "cpu" and is_plain(query) and 0 <= diagonal == n_k - n_q:
            # Not at the top, because it imports torch's compiler.
            from torch.nn.attention.bias import causal_lower_right

            return _attend(call, query, key, value, causal_lower_right(n_q, n_k))
    allowed = call.allowed_pairs()
    assert allowed is not None
    return _attend(call, query, key, value, allowed).masked_fill(~allowed.any(-1, keepdim=True), 0.0)


def _attend(
    call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    grouped = is_known_true(call.heads != call.value.shape[1])
    return functional.scaled_dot_product_attention(
        query, key, value, mask, call.dropout_p, is_causal=causal, scale=call.scale, enable_gqa=grouped
    )
