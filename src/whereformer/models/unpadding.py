"""``unpad`` lets sentence-transformers run our models, and attached ones, without padding."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from transformers import DataCollatorWithFlattening

from ..errors import InputError
from ..kernels.varlen import PACKED
from .attachment.trial_run import copy_without_hooks

Model = TypeVar("Model", bound=nn.Module)

_ALL: dict[str, bool] = {"return_seq_idx": True, "return_flash_attn_kwargs": True, "return_position_ids": True}


def unpad(model: Model) -> Model:
    """Let a model of sentence-transformers put the texts of a batch into one row without padding, in place.

    This works like ``unpad_inputs`` with FlashAttention: vectors, losses and gradients stay the same, in ``encode`` and
    in training. ``model[0].unpad_inputs = False`` turns it off. A saved folder records it, but sentence-transformers
    pads after it loads the folder, or after ``unpad_inputs`` is set to True; then call this again.

    Args:
        model: a SentenceTransformer, SparseEncoder or MultiVectorEncoder, of version 6.2 or later, whose Transformer is
            one of our encoders or has a position method attached.

    Returns:
        The model.

    Raises:
        InputError: for any other model, or if a text's vectors would depend on the other texts. The model is then
            unchanged.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    transformers: list[Any] = [module for module in modules if hasattr(module, "_infer_flatten_position_offset")]
    if not transformers:
        expected = "expected a model of sentence-transformers, 6.2 or later, with a Transformer"
        raise InputError("model", f"{expected}, got {type(model).__name__}")
    for module in transformers:
        _check(module)
    for module in transformers:
        module._unpad_inputs = module.can_flatten_inputs = True
        module.data_collator = DataCollatorWithFlattening(**_ALL)
        module._flatten_position_offset = module._infer_flatten_position_offset()
        if module.model_forward_params is not None:
            module.model_forward_params |= {*PACKED, "max_length_q", "max_length_k"}
    return model


@torch.no_grad()
def _check(module: Any) -> None:
    """Raise an InputError unless a Transformer of sentence-transformers computes the same states for packed texts."""
    model = module.model
    kind, task = type(model).__name__, module.transformer_task
    if task not in ("feature-extraction", "fill-mask"):
        raise InputError("model", f"expected the task 'feature-extraction' or 'fill-mask', got {task!r}")
    if not getattr(model.config, "full_length", True):
        reason = f"{kind} pools tokens and has no decoder, so packing would change the lengths of texts"
        raise InputError("model", reason)
    ids = [token for token in range(8) if token != model.config.pad_token_id]
    texts = ids[:5], ids[2:4], ids[5:6]
    batch = DataCollatorWithFlattening(**_ALL)([{"input_ids": text} for text in texts])
    del batch["labels"]
    batch["position_ids"] += module._infer_flatten_position_offset()
    batch = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in batch.items()}
    # In half precision, rounding may change states as much as the other texts do.
    exact = copy_without_hooks(model, {}).float().eval()
    rows = [{"input_ids": torch.tensor([text], device=model.device)} for text in texts]
    *separate_states, packed = (exact(**inputs)[0] for inputs in (*rows, batch))
    separate = torch.cat(separate_states, 1)
    # The limit is above the sum of rounding errors, and below the change that other texts make.
    if not (packed - separate).abs().max() <= torch.finfo(separate.dtype).eps ** (2 / 3) * separate.abs().max():
        reason = f"{kind} mixes packed texts; expected a whereformer encoder or a model with an attached method"
        raise InputError("model", reason)
