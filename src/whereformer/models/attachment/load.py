"""``load_attached`` loads a model that was saved with a position method attached."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ...errors import InputError, short_repr
from ..blocks import MAX_LAYERS
from ..checkpoints.files import find_config, find_weights, read_header, read_tensors
from ..checkpoints.loading import check_dtype, check_header, check_weights
from ..checkpoints.pretrained import report_bad_config
from .attach import AttachSettings, attach_with_settings
from .hooks import NAME


def load_attached(path_or_id: str | Path, model_class: Any, *, verify: bool = True, **options: Any) -> PreTrainedModel:
    """Load a model that was saved with a position method attached.

    transformers' own ``from_pretrained`` does not know the method: it reports the method's parameters as unexpected and
    loads the model without them. If the model's own positions were switched off, they are not in the checkpoint, and
    after ``detach`` the model has untrained positions. Weights are read from safetensors only.

    Args:
        path_or_id: a folder that ``save_pretrained`` wrote, or an id on the Hugging Face Hub.
        model_class: a class of transformers, or an auto class such as ``AutoModelForMaskedLM``.
        verify: as in :func:`attach`.
        options: options of ``from_pretrained``.

    Raises:
        ValueError: if nothing was attached when the model was saved, the class has a different architecture, a
            parameter of the method is missing, or the configuration and the weights differ in sizes; the sizes are
            compared before memory is allocated.
        OSError: if the checkpoint does not exist or is not in safetensors.
    """
    hub = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
    hub_options = {name: options[name] for name in hub if name in options}
    config = find_config(path_or_id, **hub_options)
    files = find_weights(path_or_id, **hub_options)
    settings = _read_settings(path_or_id, config)
    header = read_header(files)
    for name, tensor in header.items():
        if name.endswith("weight") or f"{NAME}." in name:  # buffers may hold integers
            check_dtype(name, tensor)
    _check_sizes(path_or_id, model_class, config, header, hub_options)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report would list the tensors that are loaded below
    try:
        model, report = model_class.from_pretrained(
            path_or_id, **{"trust_remote_code": False, **options, "use_safetensors": True, "output_loading_info": True}
        )
    finally:
        transformers_logging.set_verbosity(verbosity)
    max_values = sum(tensor.numel() for name, tensor in header.items() if f"{NAME}." in name)
    attach_with_settings(model, settings, verify, max_values)
    saved = read_tensors(files, part=f"{NAME}.")
    check_weights(saved)
    # The names of a base model and of a model with a head differ by a prefix.
    prefix = f"{model.base_model_prefix}."
    saved = {name.removeprefix(prefix): tensor for name, tensor in saved.items()}
    state = model.state_dict()
    # Positions that were switched off are in neither of the two.
    missing = sorted(report["missing_keys"] & state.keys())
    if missing_in_layers := [name for name in missing if re.search(r"\.\d+\.", name)]:
        reason = f"the checkpoint has no {missing_in_layers[0]!r}, so it was not saved from a {type(model).__name__}"
        raise InputError("path_or_id", reason)
    with torch.no_grad():
        for name, tensor in state.items():
            if f"{NAME}." in name:
                saved_tensor = saved.get(name.removeprefix(prefix))
                if saved_tensor is None or saved_tensor.shape != tensor.shape:
                    shape = tuple(tensor.shape)
                    raise InputError("path_or_id", f"the checkpoint has no {name!r} of shape {shape}")
                tensor.copy_(saved_tensor)
    if missing:
        logging.getLogger(__name__).warning("not in the checkpoint, so freshly drawn: %s", ", ".join(missing))
    return model


def _read_settings(path_or_id: str | Path, config: Mapping[str, Any]) -> AttachSettings:
    """Return the arguments of :func:`attach` that a model's config.json records."""
    settings = config.get(NAME)
    if settings is None:
        raise InputError("path_or_id", f"nothing was attached to the model in {path_or_id}; use from_pretrained")
    is_complete = isinstance(settings, dict) and settings.keys() == {*AttachSettings._fields}
    if not is_complete or not isinstance(settings["options"], dict):
        reason = f"expected the arguments of attach in its config.json, as {NAME!r}, got {short_repr(settings)}"
        raise InputError("path_or_id", reason)
    return AttachSettings(**settings)


def _entries(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the entries of a config.json and of the configurations inside it."""
    for name, value in config.items():
        yield name, value
        if isinstance(value, dict):
            yield from _entries(value)


def _check_sizes(
    path_or_id: str | Path,
    model_class: Any,
    config_json: Mapping[str, object],
    header: Mapping[str, Tensor],
    hub_options: Mapping[str, object],
) -> None:
    """Compare the sizes in a checkpoint's configuration with its weights, before the model is built."""
    # Configurations make lists of their layers. Some numbers of layers are larger than the model's (max_window_layers).
    limit = max(MAX_LAYERS, len(header))
    for name, value in _entries(config_json):
        if re.search(r"layers?$", name) and type(value) is int and value > limit:
            raise InputError(name, f"expected at most {limit} layers, got {value}")
    with report_bad_config():
        config = AutoConfig.from_pretrained(path_or_id, trust_remote_code=False, **hub_options)
    config_class = getattr(model_class, "config_class", config)  # an auto class has none
    if not hasattr(model_class, "from_pretrained") or config_class.model_type != config.model_type:
        name = getattr(model_class, "__name__", short_repr(model_class))
        raise InputError("model_class", f"expected a class of transformers for {config.model_type!r}, got {name}")
    build = getattr(model_class, "from_config", None) or model_class._from_config
    check_header(lambda: build(config), header)
