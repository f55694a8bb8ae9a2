"""The choice of a backend for a call, from the call's shape, the processor and the state of torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import tuning
from .call import Call
from .cpu import blockwise
from .cpu.onednn import by_onednn, is_regular
from .parts import calls_of
from .shape import Shaped
from .torch_private import derivatives, forward_mode
from .tracing import holds
from .triton import available as triton

BACKENDS = ("auto", "reference", "blockwise", "triton")


@dataclass(frozen=True)
class Choice:
    """The result of :func:`whereformer.explain`; it prints as one line.

    Args:
        backend: "reference", "blockwise", "triton", or "fused" for torch's ``scaled_dot_product_attention``.
        reason: why it was chosen.
        unavailable: the reason of each backend that cannot take the call, by name.
    """

    backend: str
    reason: str
    unavailable: dict[str, str]

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def choose(call: Shaped, backend: str, device: torch.device | None = None) -> str:
    """Return the name of the backend that computes the call.

    Args:
        call: a checked call, or the shape of one.
        backend: the requested backend, or "auto".
        device: the device that the call will run on, if its tensors are elsewhere: tensors on "meta" have only sizes.

    Raises:
        ValueError: if a backend requested by name cannot take the call.
    """
    device = call.device if device is None else device
    if backend == "auto":
        return _automatic(call, device)[0]
    if backend == "triton" and (reason := _no_triton(call, device)):
        raise ValueError(f"backend: {reason}")
    if backend != "reference" and forward_mode():
        raise ValueError(f"backend: {backend!r} has no forward-mode derivative; use backend='reference'")
    if backend != "reference" and derivatives():
        raise ValueError(f"backend: {backend!r} has no derivative for torch.func; use backend='reference'")
    return backend


def explain_choice(call: Call, backend: str) -> Choice:
    """Return the choice with its reasons."""
    chosen, device = choose(call, backend), call.device
    reasons = [_automatic(call, device)[1] if backend == "auto" else "asked for by name"]
    if chosen == "blockwise":
        found = [blockwise.explain(part) for part in calls_of(call)]
        reasons.append(found[0])
        if found[-1] != found[0]:
            reasons.append(f"sink tokens: {found[-1]}")
    kind = f"{str(call.dtype).removeprefix('torch.')} on {tuning.current().processor}"
    reason = "; ".join(filter(None, reasons)).format(kind=kind)
    no_triton = _no_triton(call, device)
    return Choice(chosen, reason, {"triton": no_triton} if no_triton else {})


def _automatic(call: Shaped, device: torch.device) -> tuple[str, str]:
    """Return the choice of backend="auto" and the reason; "{kind}" stands for the dtype and the processor."""
    on_cpu = device.type == "cpu"
    taken = derivatives()
    if forward_mode() or taken > 1:
        return "reference", "only the reference has forward-mode and second derivatives"
    if not call.has_terms and call.head_dim is not None and call.is_ordinary:
        # On the CPU torch writes all scores out for dropout, and computes padding in full before it masks it.
        masked = call.dropout_p > 0 or call.has_masks
        if on_cpu and masked and not taken and not _has_few_scores(call):
            return (
                "blockwise",
                "no terms, but dropout, padding or packing, which cost torch's own attention more on the CPU",
            )
        if call.is_packed and not on_cpu and not taken and _no_triton(call, device) is None:
            return "triton", "no terms, but packed rows, for which torch's own attention needs a matrix"
        if _onednn_beats_torch(call, device):
            return "blockwise", "no terms, but {kind}: our products are faster than torch's own attention's"
        return "fused", "no terms, so torch's own attention computes it"
    if taken:
        return "reference", "torch.func takes derivatives of the reference only"
    if not on_cpu and _no_triton(call, device) is None:
        return "triton", "on a GPU the fused kernels are fastest, in O(n) memory"
    if on_cpu and _has_few_scores(call):
        return "reference", "{kind}: so few scores a head that writing them all out is fastest"
    return "blockwise", ""


def _no_triton(call: Shaped, device: torch.device) -> str | None:
    """Return why "triton" cannot take the call on that device, and which backend can; None if it can."""
    if (reason := triton.unavailable(call, device)) is not None:
        return reason
    if not call.mixes_positions:
        return None
    return (
        "'triton' cannot combine OffsetBias2d with causal=True, a window or tables over one dimension; "
        "use backend='blockwise'"
    )


def _has_few_scores(call: Shaped) -> bool:
    """Whether a head has so few scores that writing all out beats going tile by tile on the CPU."""
    return holds(call.n_q * call.n_k <= tuning.current().written_out_scores)


def _onednn_beats_torch(call: Shaped, device: torch.device) -> bool:
    """Whether our products beat those of torch's attention for a long call without terms.

    Torch's kernel for the CPU multiplies by MKL. It keeps the calls that only torch's attention can compute: function
    transforms, tensor subclasses, autocast's dtype, and compiled and exported programs.
    """
    sizes = tuning.current()
    return (
        not torch.compiler.is_compiling()
        # First what most calls fail, so that short ones ask no more.
        and call.n_q * call.n_k >= sizes.onednn_scores
        and by_onednn(call.dtype, device)
        and call.is_plain
        and call.head_dim == call.value_dim
        and min(call.n_q, call.n_k) >= sizes.onednn_rows
        and is_regular(call.n_q)
        and is_regular(call.n_k)
        and call.value_dim >= sizes.onednn_head_dim
        # A user who has switched this kernel of torch off wants one of torch's others.
        and torch.backends.cuda.flash_sdp_enabled()
    )
