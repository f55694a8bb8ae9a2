"""``load_attached`` loads a model that was saved with a position method attached."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ...errors import InputError
from ..checkpoints.files import read_weights
from .attaching import attach
from .hooks import NAME


def load_attached(path_or_id: str | Path, model_class: Any, **options: Any) -> PreTrainedModel:
    """Load a model that was saved with a position method attached.

    transformers' own ``from_pretrained`` does not know the method: it reports its parameters as unexpected and loads
    the model without them. If the model's own positions were switched off, they are not in the checkpoint, and after
    ``detach`` the model has untrained ones. Weights are read from safetensors only.

    Args:
        path_or_id: a folder that ``save_pretrained`` wrote, or an id on the Hugging Face Hub.
        model_class: a class of transformers, or an auto class such as ``AutoModelForMaskedLM``.
        options: options of ``from_pretrained``.

    Raises:
        ValueError: if nothing was attached when the model was saved, or a parameter of the method is missing.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report would list what is loaded below
    try:
        model, found = model_class.from_pretrained(
            path_or_id, output_loading_info=True, **{**options, "use_safetensors": True}
        )
    finally:
        transformers_logging.set_verbosity(verbosity)
    settings = getattr(model.config, NAME, None)
    if settings is None:
        raise InputError("path_or_id", f"nothing was attached to the model in {path_or_id}; use from_pretrained")
    attach(model, settings["position"], keep_absolute=settings["keep_absolute"], **settings["options"])
    hub = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
    hub_options = {name: options[name] for name in hub if name in options}
    saved = read_weights(path_or_id, part=f"{NAME}.", **hub_options)
    # The names of a base model and of a model with a head differ by a prefix.
    prefix = f"{model.base_model_prefix}."
    saved = {name.removeprefix(prefix): tensor for name, tensor in saved.items()}
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            if f"{NAME}." in name:
                found_here = saved.get(name.removeprefix(prefix))
                if found_here is None or found_here.shape != tensor.shape:
                    shape = tuple(tensor.shape)
                    raise InputError("path_or_id", f"the checkpoint has no {name!r} of shape {shape}")
                tensor.copy_(found_here)
    if fresh := sorted(name for name in found["missing_keys"] if name in state):
        logging.getLogger(__name__).warning("not in the checkpoint, so freshly drawn: %s", ", ".join(fresh))
    return model
