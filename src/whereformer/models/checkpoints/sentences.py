"""What a folder of sentence-transformers holds beside its model: how states become a vector, and of how many tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers.utils import cached_file

from ...errors import InputError, shown, some_of
from ...files import check_regular

LIST, LIMIT = "modules.json", "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
SETTINGS = (LIST, PROMPTS, LIMIT)
"""Its steps, such as pooling; its prompts and similarity; and ``max_seq_length``, unless the tokenizer has it."""
OF_MODULES = (".json", ".safetensors")
"""The files of a step that are copied: settings, and weights in the only format that is read here."""
MODULES = ("Transformer", "Pooling", "Normalize")
"""The steps that are known, in this order. The last one is optional."""
POOLINGS = ("mean", "cls", "max")


@dataclass(frozen=True)
class SentenceSettings:
    """How the states of a text become its vector.

    Args:
        pooling: whether the vector is the mean of the tokens' states, the first one, or their greatest numbers.
        normalized: whether it is then divided by its length.
        limit: how many tokens of a text are read, special ones included; None if the tokenizer says it.
        lowercase: whether a text is read in lower case, whatever the tokenizer does.
    """

    pooling: str = "mean"
    normalized: bool = False
    limit: int | None = None
    lowercase: bool = False

    def vectors(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return vectors, (rows, hidden_size), of states, (rows, n, hidden_size), and their mask, (rows, n)."""
        if self.pooling == "cls":
            found = states[:, 0]
        elif self.pooling == "max":
            found = states.masked_fill(mask[..., None] == 0, float("-inf")).amax(1)
        else:
            found = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return functional.normalize(found, dim=-1) if self.normalized else found


def read_sentence_settings(path_or_id: str | Path) -> SentenceSettings | None:
    """Read what the modules of a folder of sentence-transformers do with the states.

    Args:
        path_or_id: a folder, or an id on the Hugging Face Hub.

    Returns:
        The settings. None for other folders, and for a CrossEncoder, which scores texts and makes no vectors.

    Raises:
        InputError: for ``model``, if a file can't be read, or there is a module or a pooling that is not known.
    """
    modules = _read(path_or_id, LIST, list)
    if modules is None or (_read(path_or_id, PROMPTS, dict) or {}).get("model_type") == "CrossEncoder":
        return None
    kinds = [str(step.get("type") if isinstance(step, dict) else step).rpartition(".")[2] for step in modules]
    if tuple(kinds) not in (MODULES, MODULES[:2]):
        raise InputError("model", f"expected the modules {', '.join(MODULES)}, got {some_of(kinds)}")
    # Only the name, since a path may lead out of the folder.
    step = Path(str(modules[1].get("path", "1_Pooling"))).name
    ways = _ways(_read(path_or_id, str(Path(step) / "config.json"), dict) or {})
    if len(ways) != 1 or ways[0] not in POOLINGS:
        raise InputError(
            "model", f"expected pooling by {', '.join(POOLINGS[:-1])} or {POOLINGS[-1]}, got {some_of(ways)}"
        )
    told = _read(path_or_id, LIMIT, dict) or {}
    limit = told.get("max_seq_length")
    if limit is not None and not (isinstance(limit, int) and limit > 0):
        raise InputError("model", f"expected a number of tokens as max_seq_length in {LIMIT}, got {shown(limit)}")
    return SentenceSettings(ways[0], "Normalize" in kinds, limit, bool(told.get("do_lower_case")))


def _ways(pooling: dict[str, Any]) -> list[str]:
    """Return the names of the ways to pool from the settings of a step, as older and newer releases write them."""
    given = pooling.get("pooling_mode")
    if given is not None:
        return [*map(str, given)] if isinstance(given, list) else [str(given)]
    mark = "pooling_mode_"
    older = [name.removeprefix(mark) for name, used in pooling.items() if used is True and name.startswith(mark)]
    return [name.removesuffix("_tokens").removesuffix("_token") for name in older] or ["mean"]


def _read(path_or_id: str | Path, name: str, kind: type) -> Any:
    """Return what a JSON file of a folder, or of a model on the Hub, holds; None if there is no such file.

    Raises:
        InputError: if it is not JSON, not of the kind, or not a regular file.
    """
    if Path(path_or_id).is_dir():
        file = Path(path_or_id) / name
    else:
        missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        file = Path(cached_file(path_or_id, name, **missing) or "")
    if not file.name or not file.exists():
        return None
    check_regular("model", file)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("model", f"cannot read {str(file)!r}: {error}") from None
    if not isinstance(found, kind):
        raise InputError("model", f"expected a {kind.__name__} in {str(file)!r}, got {shown(found)}")
    return found


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
    files = [source / name for name in SETTINGS if (source / name).exists()]
    # sentence-transformers numbers its steps: "1_Pooling", "2_Normalize".
    steps = sorted(path for path in source.glob("[0-9]*_*") if path.is_dir() and not path.is_symlink())
    files += [file for step in steps for file in sorted(step.iterdir()) if file.suffix in OF_MODULES]
    check_regular("model", *files)
    for step in steps:
        (target / step.name).mkdir(exist_ok=True)
    for file in files:
        shutil.copyfile(file, target / file.relative_to(source))
    if limit is not None and (file := target / LIMIT).exists():
        told = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**told, "max_seq_length": limit}, indent=2) + "\n", encoding="utf-8")
