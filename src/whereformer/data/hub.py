"""Data sets of the Hugging Face Hub, downloaded once into the cache that all of its libraries share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..lab.progress import Progress

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


def fetched(paths: Sequence[str], progress: Progress) -> list[str]:
    """Replace data sets on the Hub by the Arrow files in which the library ``datasets`` keeps them.

    Args:
        paths: ``hub:NAME``, ``hub:NAME:CONFIG`` or ``hub:NAME:CONFIG:SPLIT`` is a data set (by default, the split is
            "train"), and ``hf://datasets/NAME/*.parquet`` means files in one. Other paths stay as they are.
        progress: is told what happens.

    Raises:
        InputError: if a data set can't be read.
    """
    return [file for path in paths for file in (_files(path, progress) if path.startswith(PREFIXES) else [path])]


def _files(name: str, progress: Progress) -> list[str]:
    from datasets import load_dataset

    if name.startswith("hf://"):
        kinds = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json"}
        kind = kinds.get(Path(name).suffix.lower(), "text")
        options: dict[str, Any] = {"path": kind, "data_files": name, "split": "train"}
        if kind == "text":
            options["sample_by"] = "document"
    else:
        given, *rest = name.removeprefix("hub:").split(":")
        config, split = (*(part or None for part in rest), None, None)[:2]
        if not given or len(rest) > 2:
            raise InputError("data", f"expected hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT, got {name!r}")
        options = {"path": given, "name": config, "split": split or "train"}
    progress.begin(f"getting {name}")
    try:
        return [file["filename"] for file in load_dataset(**options).cache_files]
    except Exception as error:
        raise InputError("data", f"cannot read {name} from the Hugging Face Hub ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    """Return the first line of an error. The libraries raise errors of all kinds, and those of the network."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
