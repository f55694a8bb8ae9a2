"""Reads a checkpoint's files: its config.json, and its weights from safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import cached_file


def find_config(path_or_id: str | Path) -> dict[str, Any]:
    """Read the config.json of a checkpoint of any model.

    Raises:
        OSError: if there is no config.json.
    """
    try:
        found: dict[str, Any] = PreTrainedConfig.get_config_dict(path_or_id)[0]
    except OSError as error:
        # The original message explains the rules for names on the Hub, even if a folder was meant.
        raise OSError(
            "path_or_id: expected a folder with a checkpoint, or an id on the Hugging Face Hub that can be read, "
            f"got {str(path_or_id)!r}"
        ) from error
    return found


def read_weights(path_or_id: str | Path, part: str = "", **hub: Any) -> dict[str, Tensor]:
    """Read the weights whose names contain ``part``, from one file or several.

    Raises:
        OSError: if there is no such checkpoint, or it is not in safetensors.
    """

    def find(name: str) -> Any:
        return cached_file(path_or_id, name, _raise_exceptions_for_missing_entries=False, **hub)

    files = [find("model.safetensors")]
    if files == [None]:
        index = find("model.safetensors.index.json")
        if index is None:
            message = f"path_or_id: {path_or_id} has no model.safetensors; weights are read from safetensors only"
            if find("pytorch_model.bin") is not None:
                message += (
                    ", since its pytorch_model.bin is a pickle, which can run any code when it is opened; if you trust "
                    "it, load it in transformers with the class that its config.json names, and "
                    "save_pretrained(a folder)"
                )
            raise OSError(message)
        names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
        files = [cached_file(path_or_id, name, **hub) for name in names]
    weights = {}
    for file in files:
        try:
            with safe_open(str(file), "pt") as opened:
                weights.update({name: opened.get_tensor(name) for name in opened.keys() if part in name})  # noqa: SIM118
        except SafetensorError as error:
            raise OSError(f"path_or_id: {file} is not safetensors, or not all of it was downloaded ({error})") from None
    return weights
