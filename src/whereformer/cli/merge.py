"""The command ``whereformer merge``: join the folders of one comparison that ran on several machines."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from ..errors import InputError, short_repr
from ..lab.recipe import WithPlugin


@dataclass(frozen=True, kw_only=True)
class Merge(WithPlugin):
    """Join the folders of one comparison that ran on several machines into a new folder.

    All folders must have the same text and the same options, except the methods and seeds. If several folders have a
    result, the first folder's is taken. The printed command then makes the report of all methods.
    """

    FLAGS: ClassVar = {"folders": "FOLDERS"}
    EXAMPLE: ClassVar = "whereformer merge runs/a runs/b --out runs/both"

    folders: tuple[Path, ...]
    """The folders of `whereformer compare`, at least two."""
    out: Path
    """The new folder."""

    def run(self, console: Console) -> None:
        """Write the new folder, and print the command that makes its report."""
        from ..files import check_regular, new_folder
        from ..lab.run import HASHES, RECORDS, read_records
        from ..manifest import dump_with_hash
        from ..provenance import provenance
        from ..recipes.compare import load

        if len(self.folders) < 2:
            raise InputError("folders", f"expected at least two, got {len(self.folders)}")
        if self.out.exists():
            raise InputError("out", f"expected a folder that does not exist yet, got {self.out}")
        parts = []
        for folder in self.folders:
            try:
                recipe, _ = load(folder)
            except InputError as error:
                raise InputError("folders", error.reason) from None
            options, records, _ = read_records(folder / RECORDS)
            parts.append((folder, recipe, options, records))
        first, recipe, options, _ = parts[0]
        for folder, next_recipe, next_options, _ in parts[1:]:
            # Time decides the steps of a comparison by minutes.
            pairs: dict[str, tuple[Any, Any]] = {"steps": (recipe.steps, next_recipe.steps)}
            pairs |= {name: (options.get(name), next_options.get(name)) for name in {**options, **next_options}}
            # The hash of the text counts, and not where it lay.
            for name, (expected, actual) in pairs.items():
                if name != "data" and expected != actual:
                    what = "different texts or plugins" if name == HASHES else f"different {name}"
                    values = "" if name == HASHES else f", {short_repr(expected)} and {short_repr(actual)}"
                    raise InputError("folders", f"{first} and {folder} have {what}{values}")
        merged_records: dict[str, Any] = {}
        for *_, part in parts:
            merged_records |= {name: record for name, record in part.items() if name not in merged_records}
        keys = [key for task, *key in map(json.loads, merged_records) if task == "train"]
        if not keys:
            raise InputError("folders", "expected at least one trained model, got none")
        seeds = sorted({seed for seed, _ in keys})
        positions = tuple(dict.fromkeys(name for _, name in keys))
        sources = [folder / name for folder in reversed(self.folders) for name in ("cache", "models")]
        for source in sources:
            for parent, _, files in os.walk(source, followlinks=True):
                check_regular("folders", *(Path(parent, file) for file in files))
        with new_folder(self.out) as merged:
            for source in filter(Path.is_dir, sources):  # the first folder's files replace other folders' files
                shutil.copytree(source, merged / source.name, dirs_exist_ok=True)
            first_line = {"options": options, **provenance(options["device"])}
            (merged / RECORDS).write_text("".join(map(dump_with_hash, [first_line, *merged_records.values()])))
        console.print(f"wrote {self.out} with {len(keys)} models; make its report by:", highlight=False, soft_wrap=True)
        seed, stop, steps, minutes = seeds[0], seeds[-1] + 1, options["steps"], options["minutes"]
        recipe = replace(recipe, positions=positions, seed=seed, seeds=stop - seed, steps=steps, minutes=minutes)
        console.print(replace(recipe, out=self.out).format_command(), highlight=False, soft_wrap=True)
