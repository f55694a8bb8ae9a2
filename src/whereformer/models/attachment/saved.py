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
from ..blocks import MOST_LAYERS
from ..checkpoints.files import find_config, find_weights, read_header, read_tensors
from ..checkpoints.loading import check_dtype, check_header, check_weights
from ..checkpoints.pretrained import read_as_a_model
from .attaching import Wanted, attach_wanted
from .hooks import NAME


def load_attached(path_or_id: str | Path, model_class: Any, *, prove: bool = True, **options: Any) -> PreTrainedModel:
    """Load a model that was saved with a position method attached.

    transformers' own ``from_pretrained`` does not know the method: it reports its parameters as unexpected and loads
    the model without them. If the model's own positions were switched off, they are not in the checkpoint, and after
    ``detach`` the model has untrained ones. Weights are read from safetensors only.

    Args:
        path_or_id: a folder that ``save_pretrained`` wrote, or an id on the Hugging Face Hub.
        model_class: a class of transformers, or an auto class such as ``AutoModelForMaskedLM``.
        prove: as in :func:`attach`.
        options: options of ``from_pretrained``.

    Raises:
        ValueError: if nothing was attached when the model was saved, the class is of another architecture, a parameter
            of the method is missing, or the sizes in the configuration are not those of the weights, which is found
            before memory is taken.
        OSError: if there is no such checkpoint, or it is not in safetensors.
    """
    hub = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
    hub_options = {name: options[name] for name in hub if name in options}
    described = find_config(path_or_id, **hub_options)
    files = find_weights(path_or_id, **hub_options)
    wanted = _settings_of(path_or_id, described)
    header = read_header(files)
    for name, tensor in header.items():
        if name.endswith("weight") or f"{NAME}." in name:  # buffers may hold whole numbers
            check_dtype(name, tensor)
    _check_sizes(path_or_id, model_class, described, header, hub_options)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report would list what is loaded below
    try:
        model, found = model_class.from_pretrained(
            path_or_id,
            **{"trust_remote_code": False, **options, "use_safetensors": True, "output_loading_info": True},
        )
    finally:
        transformers_logging.set_verbosity(verbosity)
    most = sum(tensor.numel() for name, tensor in header.items() if f"{NAME}." in name)
    attach_wanted(model, wanted, prove, most)
    saved = read_tensors(files, part=f"{NAME}.")
    check_weights(saved)
    # The names of a base model and of a model with a head differ by a prefix.
    prefix = f"{model.base_model_prefix}."
    saved = {name.removeprefix(prefix): tensor for name, tensor in saved.items()}
    state = model.state_dict()
    # Positions that were switched off are in neither.
    missing = sorted(found["missing_keys"] & state.keys())
    if lost := [name for name in missing if re.search(r"\.\d+\.", name)]:
        kind = type(model).__name__
        raise InputError("path_or_id", f"the checkpoint has no {lost[0]!r}, so it is of another model than {kind}")
    with torch.no_grad():
        for name, tensor in state.items():
            if f"{NAME}." in name:
                found_here = saved.get(name.removeprefix(prefix))
                if found_here is None or found_here.shape != tensor.shape:
                    shape = tuple(tensor.shape)
                    raise InputError("path_or_id", f"the checkpoint has no {name!r} of shape {shape}")
                tensor.copy_(found_here)
    if missing:
        logging.getLogger(__name__).warning("not in the checkpoint, so freshly drawn: %s", ", ".join(missing))
    return model


def _settings_of(path_or_id: str | Path, config: Mapping[str, Any]) -> Wanted:
    """Return what a model's config.json says of what was attached."""
    settings = config.get(NAME)
    if settings is None:
        raise InputError("path_or_id", f"nothing was attached to the model in {path_or_id}; use from_pretrained")
    told = isinstance(settings, dict) and settings.keys() == {*Wanted._fields}
    if not told or not isinstance(settings["options"], dict):
        raise InputError("path_or_id", f"its config.json does not say what was attached, got {short_repr(settings)}")
    return Wanted(**settings)


def _entries(described: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the entries of a config.json and of the configurations inside it."""
    for name, value in described.items():
        yield name, value
        if isinstance(value, dict):
            yield from _entries(value)


def _check_sizes(
    path_or_id: str | Path,
    model_class: Any,
    described: Mapping[str, Any],
    header: Mapping[str, Tensor],
    hub: Mapping[str, Any],
) -> None:
    """Compare the sizes in a checkpoint's configuration with its weights, before the model is built."""
    # Configurations make lists of their layers. Some numbers are not of layers that the model has (max_window_layers).
    limit = max(MOST_LAYERS, len(header))
    for name, value in _entries(described):
        if re.search(r"layers?$", name) and type(value) is int and value > limit:
            raise InputError(name, f"expected at most {limit} layers, got {value}")
    with read_as_a_model():
        config = AutoConfig.from_pretrained(path_or_id, trust_remote_code=False, **hub)
    own = getattr(model_class, "config_class", config)  # an auto class has none
    if not hasattr(model_class, "from_pretrained") or own.model_type != config.model_type:
        name = getattr(model_class, "__name__", short_repr(model_class))
        raise InputError("model_class", f"expected a class of transformers for {config.model_type!r}, got {name}")
    build = getattr(model_class, "from_config", None) or model_class._from_config
    check_header(lambda: build(config), header)
