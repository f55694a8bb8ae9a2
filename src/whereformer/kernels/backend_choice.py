"""The choice of a backend for a call, from its sizes, its device and the state of torch.

It does not depend on whether gradients are on, so that a checkpoint, which computes without them first, chooses the
same backend twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import blockwise, native
from .call import GRADIENTS, TERMS, Call
from .precision import autocast_dtype
from .torch_private import count_derivatives, is_forward_mode
from .tracing import is_plain
from .triton import launch as triton

OPERATORS = {
    operators.backend.name: operators for operators in (blockwise.operators, native.operators, triton.operators)
}
"""The operators of every backend that has some, by its name."""

BACKENDS = ("auto", "reference", *OPERATORS)
"""The values of the argument ``backend``."""


@dataclass(frozen=True)
class BackendChoice:
    """The result of :func:`whereformer.explain`; it prints as one line.

    Args:
        backend: "reference", "blockwise", "native", "triton", or "sdpa" for torch's ``scaled_dot_product_attention``,
            which only "auto" chooses.
        reason: why it was chosen.
        unavailable: for each backend that cannot compute the call, the reason.
    """

    backend: str
    reason: str
    unavailable: dict[str, str]

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def choose_backend(call: Call, backend: str, device: torch.device | None = None) -> str:
    """Return the name of the backend that computes a call, if ``backend`` is requested.

    Args:
        device: the device that the call will run on. If None, the device of its tensors. Tensors on "meta" have only
            sizes.

    Raises:
        ValueError: if the backend is unknown or does not support the call.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    device = call.value.device if device is None else device
    if backend == "auto":
        return _choose_auto(call, device)[0]
    if reason := _unsupported_reason(backend, call, device):
        raise ValueError(f"backend: {backend!r} {reason}; use backend='blockwise'")
    if backend != "reference" and count_derivatives():
        kind = "forward-mode derivative" if is_forward_mode() else "derivative for torch.func"
        raise ValueError(f"backend: {backend!r} has no {kind}; use backend='reference'")
    return backend


def explain_choice(call: Call, backend: str) -> BackendChoice:
    """Return the choice with its reasons."""
    device = call.value.device
    chosen = choose_backend(call, backend)
    reason = _choose_auto(call, device)[1] if backend == "auto" else "asked for by name"
    reasons = {name: _unsupported_reason(name, call, device) for name in BACKENDS}
    unavailable = {name: f"{name!r} {why}; use backend='blockwise'" for name, why in reasons.items() if why}
    return BackendChoice(chosen, reason, unavailable)


def _choose_auto(call: Call, device: torch.device) -> tuple[str, str]:
    """Return the choice of backend="auto" and the reason."""
    if torch.compiler.is_exporting():
        return "reference", "other programs know its operations"
    on_cpu = device.type == "cpu"
    num_derivatives = count_derivatives()
    if num_derivatives > 1:
        return "reference", "only the reference has forward-mode and second derivatives"
    not_native = _unsupported_reason("native", call, device)
    has_terms = any(getattr(call, name) is not None for name in TERMS)
    no_window = call.min_offset is None and (call.max_offset is None or call.max_offset == 0)
    # Torch's own attention supports all features of such a call.
    if no_window and call.query is not None and not (has_terms or call.wants_lse or call.softcap is not None):
        packed_on_gpu = call.query_documents is not None and not on_cpu and not num_derivatives
        if packed_on_gpu and _unsupported_reason("triton", call, device) is None:
            return "triton", "no terms, but packed rows, for which torch's own attention needs a matrix"
        # Programs, transforms and subclasses of tensors know torch's own attention, and autocast casts for it.
        casts = autocast_dtype(call.value.device) not in (None, call.value.dtype)
        if not_native is not None or casts or not is_plain(call.query, call.key, call.value):
            return "sdpa", "no terms, so torch's own attention computes it"
    if num_derivatives:
        return "reference", "torch.func takes derivatives of the reference only"
    if not_native is None:
        return "native", "on the CPU the compiled kernel is fastest, in O(n) memory"
    if not on_cpu and _unsupported_reason("triton", call, device) is None:
        return "triton", "on a GPU the fused kernels are fastest, in O(n) memory"
    slow = "some queries at a time in plain PyTorch, in O(n) memory"
    return "blockwise", f"{slow}; the compiled kernel would be faster, but it {not_native}" if on_cpu else slow


def _unsupported_reason(name: str, call: Call, device: torch.device) -> str | None:
    """Return why a backend does not support the call on that device; None if it does."""
    if name not in OPERATORS:
        return None
    backend = OPERATORS[name].backend
    inputs = [field for field in GRADIENTS if getattr(call, field) is not None]
    unknown = [field for field in inputs if field not in backend.supported_inputs]
    return backend.unsupported_reason(call, device) or (f"does not support {unknown[0]}" if unknown else None)
