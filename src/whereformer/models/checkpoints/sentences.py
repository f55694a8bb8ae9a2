"""What a folder of sentence-transformers holds beside its model: how states become a vector, and of how many tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import InputError, shown, some_of
from ...files import check_regular, read_json

LIST, LIMIT = "modules.json", "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
SETTINGS = (LIST, PROMPTS, LIMIT)
"""Its steps, such as pooling; its prompts and similarity; and ``max_seq_length``, unless the tokenizer has it."""
MODULES = ("Transformer", "Pooling", "Normalize")
"""The steps that are known, in this order. The last one is optional."""
POOLINGS = ("mean", "cls")


class SentenceSettings(NamedTuple):
    """How the states of a text become its vector.

    Args:
        pooling: whether the vector is the mean of the tokens' states ("mean") or the first one ("cls").
        limit: how many tokens of a text are read, special ones included; None if the tokenizer says it.
    """

    pooling: str = "mean"
    limit: int | None = None


def read_sentence_settings(folder: Path) -> SentenceSettings | None:
    """Read what the modules of a folder of sentence-transformers do with the states.

    Returns:
        The settings. None for other folders, and for a CrossEncoder, which scores texts and makes no vectors.

    Raises:
        InputError: for ``model``, if a file can't be read, or there is a module or a pooling that is not known.
    """
    modules = _read(folder, LIST, list)
    if modules is None or (_read(folder, PROMPTS, dict) or {}).get("model_type") == "CrossEncoder":
        return None
    kinds = [str(step.get("type") if isinstance(step, dict) else step).rpartition(".")[2] for step in modules]
    if tuple(kinds) not in (MODULES, MODULES[:2]):
        raise InputError("model", f"expected the modules {', '.join(MODULES)}, got {some_of(kinds)}")
    # Only the name, since a path may lead out of the folder.
    step = Path(str(modules[1].get("path", "1_Pooling"))).name
    ways = _ways(_read(folder, str(Path(step) / "config.json"), dict) or {})
    if len(ways) != 1 or ways[0] not in POOLINGS:
        raise InputError("model", f"expected pooling by {' or '.join(POOLINGS)}, got {some_of(ways)}")
    limit = (_read(folder, LIMIT, dict) or {}).get("max_seq_length")
    if limit is not None and not (isinstance(limit, int) and limit > 0):
        raise InputError("model", f"expected a number of tokens as max_seq_length in {LIMIT}, got {shown(limit)}")
    return SentenceSettings(ways[0], limit)


def _ways(pooling: dict[str, Any]) -> list[str]:
    """Return the names of the ways to pool from the settings of a step, as older and newer releases write them."""
    given = pooling.get("pooling_mode")
    if given is not None:
        return [*map(str, given)] if isinstance(given, list) else [str(given)]
    mark = "pooling_mode_"
    older = [name.removeprefix(mark) for name, used in pooling.items() if used is True and name.startswith(mark)]
    return [name.removesuffix("_tokens").removesuffix("_token") for name in older] or ["mean"]


def _read(folder: Path, name: str, kind: type) -> Any:
    """Return what a JSON file of a folder holds; None if there is no such file."""
    return read_json("model", folder / name, kind) if (folder / name).exists() else None


def keep_sentence_settings(source: str | Path, target: Path, *, limit: int | None = None) -> None:
    """Copy what sentence-transformers needs beside a model from its folder to that of another model.

    Without it, that program takes the mean of all states of up to the tokenizer's length. Nothing is copied from other
    folders, and nothing of a model on the Hugging Face Hub.

    Args:
        source: the folder of the original model.
        target: a folder, which exists.
        limit: the new model's ``max_seq_length``, if it is not the original's.

    Raises:
        InputError: for ``model``, if a file to copy is a device, a pipe or a socket.
    """
    source = Path(source)
    if not (source / LIST).exists():
        return
    # sentence-transformers numbers its steps: "1_Pooling", "2_Normalize".
    names = [*SETTINGS, "[0-9]*_*/*.json", "[0-9]*_*/*.safetensors"]
    files = [file for name in names for file in sorted(source.glob(name))]
    check_regular("model", *files)
    for file in files:
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if limit is not None and (file := target / LIMIT).exists():
        told = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**told, "max_seq_length": limit}, indent=2) + "\n", encoding="utf-8")
