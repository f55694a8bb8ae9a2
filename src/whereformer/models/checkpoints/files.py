"""Reads a checkpoint's files: its config.json, the shapes of its weights, and the weights, from safetensors only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from ...errors import InputError, one_line, short_repr
from ...files import check_regular_in, read_json
from ..checks import check_entries


def find_config(path_or_id: str | Path, **hub: Any) -> dict[str, Any]:
    """Read the config.json of a checkpoint of any model.

    Args:
        path_or_id: a folder, or an id on the Hugging Face Hub.
        hub: options of the Hub, such as ``revision``.

    Raises:
        OSError: if neither a folder nor a model on the Hub has this name.
        InputError: if a folder has no config.json or contains a pipe or a device, or if the config.json is not a
            dictionary.
    """
    if not isinstance(path_or_id, str | Path):
        reason = f"expected a folder with a checkpoint, or an id on the Hugging Face Hub, got {short_repr(path_or_id)}"
        raise InputError("path_or_id", reason)
    check_regular_in("path_or_id", path_or_id)
    folder = Path(path_or_id, hub.get("subfolder") or "")
    if os.path.isdir(folder):  # False for names that are too long
        check_has_config("path_or_id", folder)
    try:
        file = cached_file(path_or_id, "config.json", **hub)
    except OSError as error:
        # The original message explains the rules for names on the Hub.
        raise OSError(
            "path_or_id: expected a folder with a checkpoint, or an id on the Hugging Face Hub that can be read, "
            f"got {str(path_or_id)!r}"
        ) from error
    config: dict[str, Any] = read_json("path_or_id", Path(file), dict)
    check_entries(config)
    return config


def check_has_config(name: str, folder: Path) -> None:
    """Check that a folder has the config.json of a checkpoint.

    Raises:
        InputError: for ``name``, if it has none; for the folder of a run, the error suggests the folder of a model.
    """
    if not (folder / "config.json").is_file():
        models = (model for model in (folder / "model", *sorted(folder.glob("models/*")), *sorted(folder.glob("*"))))
        hint = next((f"; did you mean {str(model)!r}?" for model in models if (model / "config.json").exists()), "")
        raise InputError(name, f"expected a folder with a config.json, got {str(folder)!r}{hint}")


def find_weights(path_or_id: str | Path, **hub: object) -> list[Path]:
    """Return the files with a checkpoint's weights, one or several.

    An index lists the names of several files. It is untrusted: the files must be in the checkpoint's folder. The
    arguments are as in :func:`find_config`.

    Raises:
        OSError: if the checkpoint does not exist or is not in safetensors.
        InputError: if its index is damaged, or names a file in another folder.
    """

    def find(name: str) -> str | None:
        return cached_file(path_or_id, name, _raise_exceptions_for_missing_entries=False, **hub)

    single_file = find("model.safetensors")
    if single_file is not None:
        return [Path(single_file)]
    index = find("model.safetensors.index.json")
    if index is None:
        raise OSError(
            f"path_or_id: {path_or_id} has no model.safetensors; weights are read from safetensors only, since a "
            "pickle such as pytorch_model.bin can run any code when it is opened; transformers' save_pretrained writes "
            "safetensors"
        )
    files = []
    for name in _names(Path(index)):
        if (file := find(name)) is None:
            raise InputError("path_or_id", f"{index} names {short_repr(name)}, which is missing")
        files.append(Path(file))
    return files


def _names(index: Path) -> list[str]:
    """Read the names of files from an index, and check that they are names, not paths."""
    listed = read_json("path_or_id", index, dict).get("weight_map")
    names = [*listed.values()] if isinstance(listed, dict) else []
    plain = [name for name in names if isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name)]
    if len(plain) < len(names) or not names:
        entry = next((name for name in names if name not in plain), listed)
        reason = f"{index} must name safetensors files in its own folder, got {short_repr(entry)}"
        raise InputError("path_or_id", reason)
    return sorted(set(plain))


def read_header(files: Sequence[Path]) -> dict[str, Tensor]:
    """Read the names, shapes and dtypes of weights, as tensors on the meta device, which take no memory.

    Raises:
        OSError: if a file is not in safetensors.
    """
    return {name: tensor.to("meta") for name, tensor in _read(files)}


def read_tensors(files: Sequence[Path], part: str = "") -> dict[str, Tensor]:
    """Read the weights whose names contain ``part`` from files.

    Raises:
        OSError: if a file is not in safetensors.
    """
    return {name: tensor for name, tensor in _read(files) if part in name}


def _read(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each weight in the files, and the weight, which is not read before it is used."""
    for file in files:
        try:
            with safe_open(str(file), "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # it is not a dictionary
                    yield name, opened.get_tensor(name)
        except (SafetensorError, RuntimeError, OverflowError, TypeError) as error:
            reason = f"{file} is not safetensors, or not all of it was downloaded ({one_line(str(error))})"
            raise OSError(f"path_or_id: {reason}") from None
