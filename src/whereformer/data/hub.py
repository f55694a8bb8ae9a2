"""Download data sets from the Hugging Face Hub: their files as they are, or the text of their rows as one file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import naming, new_file
from ..lab.progress import Progress
from .read import pick_column

PREFIXES = ("hub:", "hf://")


def downloaded(name: str, config: str) -> Path:
    """Download the Parquet files of a configuration of a data set, once, and return the data set's folder.

    Raises:
        InputError: if that fails.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=f"{config}/*.parquet"))
    except Exception as error:
        told = f"cannot get {config} from the Hub ({_reason(error)}); or give a folder that has it"
        raise InputError("data", told) from None


def fetched(paths: Sequence[str], column: str | None, folder: Path, progress: Progress) -> list[str]:
    """Replace data sets on the Hub by files with their text.

    A data set is copied once. The copy does not change when the data set does, and is made again if it is deleted.

    Args:
        paths: ``hub:NAME``, ``hub:NAME:CONFIG`` or ``hub:NAME:CONFIG:SPLIT`` is a data set (by default, the split is
            "train"), and ``hf://datasets/NAME/*.parquet`` means files in one. Other paths stay as they are.
        column: the text column; by default "text", or the only column of strings.
        folder: the folder for copies.
        progress: is told what happens.

    Raises:
        InputError: if a data set can't be read, or it is not clear which column is the text.
    """
    return [_copy(path, column, folder, progress) if path.startswith(PREFIXES) else path for path in paths]


def _copy(name: str, column: str | None, folder: Path, progress: Progress) -> str:
    key = hashlib.sha256(f"{name}\0{column or ''}".encode()).hexdigest()[:16]
    path = folder / f"hub-{key}.jsonl"
    if path.exists():
        return str(path)
    progress.begin(f"copying {name}")
    folder.mkdir(parents=True, exist_ok=True)
    # Too long to be held in memory until it is written.
    with new_file(path) as partial, naming(path), partial.open("x", encoding="utf-8") as file:
        for count, row in enumerate(_rows(name, column), 1):
            file.write(json.dumps(row) + "\n")
            progress.step(0, f"{count:,} rows")
    return str(path)


def _rows(name: str, column: str | None) -> Iterator[dict[str, str]]:
    """Yield the text of each row, under the name of its column."""
    try:
        chosen = column
        for row in _opened(name):
            if chosen is None:
                strings = [key for key, value in row.items() if isinstance(value, str)]
                chosen = pick_column(strings, None, name)
            if chosen not in row:
                raise InputError("column", f"{name} has no column {chosen!r}; it has {', '.join(row)}")
            if isinstance(row[chosen], str):
                yield {chosen: row[chosen]}
    except InputError:
        raise
    except Exception as error:
        raise InputError("data", f"cannot read {name} from the Hugging Face Hub ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    """Return the first line of an error. The libraries raise errors of all kinds, and those of the network."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _opened(name: str) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    if name.startswith("hf://"):
        kinds = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json"}
        suffix = Path(name).suffix.lower()
        options: dict[str, Any] = {"data_files": name, **({} if suffix in kinds else {"sample_by": "document"})}
        return iter(load_dataset(kinds.get(suffix, "text"), split="train", streaming=True, **options))
    given, *rest = name.removeprefix("hub:").split(":")
    config, split = (*(part or None for part in rest), None, None)[:2]
    if not given or len(rest) > 2:
        raise InputError("data", f"expected hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT, got {name!r}")
    return iter(load_dataset(given, config, split=split or "train", streaming=True))
