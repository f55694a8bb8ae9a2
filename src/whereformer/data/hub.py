"""Data sets of the Hugging Face Hub, downloaded once into the cache that all of its libraries share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError

PREFIXES = ("hub:", "hf://")


def fetched(paths: Sequence[str], say: Callable[[str], object] = lambda line: None) -> list[str]:
    """Replace data sets on the Hub by the Arrow files in which the library ``datasets`` keeps them.

    Args:
        paths: ``hub:NAME``, ``hub:NAME:CONFIG`` or ``hub:NAME:CONFIG:SPLIT`` is a data set (by default, the split is
            "train"), and ``hf://datasets/NAME/*.parquet`` means files in one. Other paths stay as they are.
        say: is told what happens.

    Raises:
        InputError: if a data set can't be read.
    """
    return [file for path in paths for file in (_files(path, say) if path.startswith(PREFIXES) else [path])]


def _files(name: str, say: Callable[[str], object]) -> list[str]:
    if name.startswith("hf://"):
        kinds = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json"}
        kind = kinds.get(Path(name).suffix.lower(), "text")
        options: dict[str, Any] = {"path": kind, "data_files": name, "split": "train"}
        if kind == "text":
            options["sample_by"] = "document"
    else:
        given, config, split, *more = [*name.removeprefix("hub:").split(":"), "", ""]
        if not given or len(more) > 2 or any(more):
            raise InputError("data", f"expected hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT, got {name!r}")
        options = {"path": given, "name": config or None, "split": split or "train"}
    from datasets import load_dataset  # which takes two seconds to import

    say(f"getting {name}")
    try:
        return [file["filename"] for file in load_dataset(**options).cache_files]
    except Exception as error:  # of all kinds, and those of the network
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError("data", f"cannot read {name} from the Hugging Face Hub ({reason})") from None
