"""``unpad`` lets sentence-transformers run our models, and attached ones, without padding."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from transformers import DataCollatorWithFlattening, PreTrainedModel

from ..errors import InputError
from ..kernels.varlen import PACKED
from .attachment.trial_run import copy_without_hooks

Model = TypeVar("Model", bound=nn.Module)

_ALL: dict[str, Any] = {"return_seq_idx": True, "return_flash_attn_kwargs": True, "return_position_ids": True}


def unpad(model: Model) -> Model:
    """Let a model of sentence-transformers put the texts of a batch into one row without padding, in place.

    It does what ``unpad_inputs`` does with FlashAttention: vectors, losses and gradients stay the same,
    in ``encode`` and in training. ``model[0].unpad_inputs = False`` turns it off. A saved folder records it, but
    sentence-transformers pads when it loads the folder, or when ``unpad_inputs`` is set to True; call this again then.

    Args:
        model: a SentenceTransformer, SparseEncoder or MultiVectorEncoder, of version 6.2 or later, whose Transformer is
            one of our encoders or has a position method attached.

    Returns:
        The model.

    Raises:
        InputError: for another model, or one whose vectors would not be those of each text alone. It is then as it was.
    """
    parts = model.modules() if isinstance(model, nn.Module) else ()
    found: list[Any] = [part for part in parts if hasattr(part, "_infer_flatten_position_offset")]
    if not found:
        needed = "expected a model of sentence-transformers, 6.2 or later, with a Transformer"
        raise InputError("model", f"{needed}, got {type(model).__name__}")
    for module in found:
        _check(module)
    for module in found:
        module._unpad_inputs = module.can_flatten_inputs = True
        module.data_collator = DataCollatorWithFlattening(**_ALL)
        module._flatten_position_offset = module._infer_flatten_position_offset()
        if module.model_forward_params is not None:
            module.model_forward_params |= {*PACKED, "max_length_q", "max_length_k"}
    return model


@torch.no_grad()
def _check(module: Any) -> None:
    """Raise an InputError unless a Transformer of sentence-transformers has the same states for packed texts."""
    own: PreTrainedModel = module.model
    kind, task = type(own).__name__, module.transformer_task
    if task not in ("feature-extraction", "fill-mask"):
        raise InputError("model", f"expected a task of states or masked words, which have no padding, got {task!r}")
    if not getattr(own.config, "full_length", True):
        raise InputError("model", f"{kind} pools tokens and has no decoder, so texts would have other lengths in a row")
    ids = [token for token in range(8) if token != own.config.pad_token_id]
    texts = ids[:5], ids[2:4], ids[5:6]
    batch = DataCollatorWithFlattening(**_ALL)([{"input_ids": text} for text in texts])
    del batch["labels"]
    batch["position_ids"] += module._infer_flatten_position_offset()
    batch = {name: value.to(own.device) if torch.is_tensor(value) else value for name, value in batch.items()}
    # In half precision, rounding changes as much as other texts may.
    exact = copy_without_hooks(own, {}).float().eval()
    rows = [{"input_ids": torch.tensor([text], device=own.device)} for text in texts]
    *parts, packed = (exact(**given)[0] for given in (*rows, batch))
    alone = torch.cat(parts, 1)
    # More than rounding adds up to, and less than other texts change.
    if not (packed - alone).abs().max() <= torch.finfo(alone.dtype).eps ** (2 / 3) * alone.abs().max():
        reason = "does not keep packed texts apart; expected an encoder of whereformer, or a model with attach"
        raise InputError("model", f"{kind} {reason}")
