"""What a folder of sentence-transformers holds beside its model: how states become a vector, and of how many tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ...files import check_regular

LIST, LIMIT = "modules.json", "sentence_bert_config.json"
SETTINGS = (LIST, "config_sentence_transformers.json", LIMIT)
"""Its steps, such as pooling; its prompts and similarity; and ``max_seq_length``, unless the tokenizer has it."""
OF_MODULES = (".json", ".safetensors")
"""The files of a step that are copied: settings, and weights in the only format that is read here."""


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
