"""Tokenize labeled rows once, into files beside the run, and put them into batches, padded or packed.

A cache has a folder for each task and way to tokenize. It holds four files for each split: the ids of its rows, their
lengths, the token types, and for each row a byte that tells whether it was truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import InputError
from ..lab.progress import Progress
from .corpus import fingerprint
from .glue import Split
from .row_files import RowFile, append_rows, file_names, open_rows
from .shards import Entry, Index, Lots
from .streams import Appended, TokenFile, packed
from .windows import end_padding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models import EncoderConfig


LOT = 1024
"""Number of rows that are tokenized at a time."""
SHARD = 1 << 16
"""Number of rows in a shard: a few seconds of work."""
ID, TYPE = 4, 2
"""Bytes of a token id and of a token type in a file."""
FILES = 4
"""Number of files of a split."""


@dataclass(frozen=True)
class Lists(Sequence[list[int]]):
    """Lists of whole numbers in a file, each read when it is asked for."""

    rows: RowFile

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> list[int]:  # type: ignore[override]  # slices are never asked for
        if not 0 <= place < len(self):
            raise IndexError(place)
        return self.rows[place][0].tolist()

    @property
    def lengths(self) -> list[int]:
        """The length of each list."""
        return self.rows.lengths[:, 0].tolist()


@dataclass(frozen=True)
class Rows(Dataset[dict[str, Any]]):
    """The tokenized rows of a split.

    Args:
        ids: the token ids of each row.
        types: the token types of each row; None unless the tokenizer gives them and the model has them.
        labels: the label of each row.
        cut: number of rows that were truncated.
        pad: the id of padding.
        end: padding tokens after even the longest row of a batch; a funnel that truncates drops them.
    """

    ids: Lists
    types: Lists | None
    labels: list[float]
    cut: int
    pad: int
    end: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, Any]:
        found = {"ids": self.ids[row], "label": self.labels[row]}
        return found if self.types is None else {**found, "types": self.types[row]}

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row."""
        return self.ids.lengths

    def padded(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate rows into a padded batch, (rows, tokens of the longest row plus ``end``)."""
        width = max(len(row["ids"]) for row in rows) + self.end
        lengths = torch.tensor([len(row["ids"]) for row in rows])
        batch = {"input_ids": torch.tensor([row["ids"] + [self.pad] * (width - len(row["ids"])) for row in rows])}
        if self.types is not None:
            batch["token_type_ids"] = torch.tensor([row["types"] + [0] * (width - len(row["types"])) for row in rows])
        if int(lengths.min()) < width:
            batch["attention_mask"] = (torch.arange(width) < lengths.unsqueeze(1)).long()
        return {**batch, "labels": torch.tensor([row["label"] for row in rows])}

    def packed(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate rows into a packed batch: one row, (1, all tokens), with position and document ids."""
        lengths = torch.tensor([len(row["ids"]) for row in rows])
        batch = {"input_ids": torch.tensor([[token for row in rows for token in row["ids"]]])}
        if self.types is not None:
            batch["token_type_ids"] = torch.tensor([[kind for row in rows for kind in row["types"]]])
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        return {
            **batch,
            "position_ids": (torch.arange(int(lengths.sum())) - starts).unsqueeze(0),
            "document_ids": torch.arange(len(rows)).repeat_interleave(lengths).unsqueeze(0),
            "labels": torch.tensor([row["label"] for row in rows]),
        }


@dataclass(frozen=True)
class RowCache:
    """The folder of tokenized rows.

    Args:
        folder: the folder.
        scratch: a folder of this process alone to tokenize into, if the cache is not to change.
        progress: is told what happens.
    """

    folder: Path
    scratch: Path | None = None
    progress: Progress = field(default_factory=Progress)

    def rows(
        self,
        key: Sequence[str],
        splits: Sequence[Split],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None,
        config: EncoderConfig,
        *,
        regression: bool,
    ) -> list[Rows]:
        """Open the rows of all splits if the cache has them, else tokenize them, with all processors.

        Rows have the special tokens that the tokenizer puts around text. Only one process may tokenize at a time.

        Args:
            key: what tells these rows and this tokenizer from others.
            splits: the labeled rows.
            tokenizer: the model's tokenizer.
            max_length: truncate longer rows to this number of tokens, the longer text of a pair first; None truncates
                none.
            config: the model's configuration: how many token types it has, and whether its poolings drop the end of a
                row.
            regression: whether labels are numbers to predict.

        Raises:
            InputError: if a table changes meanwhile, the folder can't be written, or another process is writing to it.
        """
        names = tuple(each for place in range(len(splits)) for each in _names(place))
        entry = Entry(self.folder / f"rows-{fingerprint([*key, str(max_length)])}", names)
        index = entry.complete()
        if index is None:
            entry = entry.within(self.scratch)
            with entry.locked():
                index = _encoded(entry, splits, tokenizer, max_length, self.progress)
        end, pad = end_padding(config), tokenizer.pad_token_id
        found = []
        for place, split in enumerate(splits):
            ids, types, cut = _opened(entry, index, place, config.type_vocab_size)
            labels = [float(label) for label in split.labels] if regression else list(split.labels)
            found.append(Rows(ids, types, labels, cut, pad, end))
        return found


def _names(place: int) -> tuple[str, ...]:
    name = f"split{place}"
    return (*file_names(name), f"{name}.types", f"{name}.cut")


def _encoded(
    entry: Entry,
    splits: Sequence[Split],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    progress: Progress,
) -> Index:
    # The tokenizer's own limit does not matter: the model checks whether rows fit.
    options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
    rows = ((place, row) for place, split in enumerate(splits) for row in split.texts)

    def write(first: int, lot: list[tuple[int, tuple[str, ...]]], files: list[Appended]) -> None:
        for place, group in groupby(lot, itemgetter(0)):
            texts = [list(side) for side in zip(*(row for _, row in group), strict=True)]
            found = tokenizer(*texts, **options)
            longer = [max_length is not None and len(row) > max_length for row in found["input_ids"]]
            if any(longer):
                found = tokenizer(*texts, truncation=True, max_length=max_length, **options)
            ids, lengths, types, cut = files[FILES * place : FILES * (place + 1)]
            append_rows((ids, lengths), ([row] for row in found["input_ids"]), ID)
            types.write(packed(chain.from_iterable(found.get("token_type_ids") or ()), TYPE))
            cut.write(bytes(longer))
            progress.step(len(longer))

    index = entry.begin(progress)
    progress.start(sum(len(split.labels) for split in splits))
    progress.begin("tokenizing the rows")
    progress.step(sum(shard.items for shard in index.shards))
    index = entry.extend(index, rows, Lots(LOT, SHARD), write)
    if not all(split.unchanged() for split in splits):
        entry.drop()
        raise InputError(None, "a table changed while it was read; run the same command again")
    return entry.finish(index, {})


def _opened(entry: Entry, index: Index, place: int, kinds: int) -> tuple[Lists, Lists | None, int]:
    """Return a split's ids, its types if there are any and a model has so many, and how many rows were truncated."""
    sizes = [index.size(FILES * place + each) for each in range(FILES)]
    *_, types_name, cut_name = _names(place)
    rows = open_rows(entry.folder, f"split{place}", ID, 1, sizes[:2])
    types = TokenFile(entry.folder / types_name, TYPE, sizes[2] // TYPE)
    # Without types in the model, as with RoBERTa, or from the tokenizer, there are none.
    typed = len(types) == len(rows.ids) and types.largest() < kinds
    with (entry.folder / cut_name).open("rb") as file:
        cut = file.read(sizes[3]).count(1)
    return Lists(rows), Lists(replace(rows, ids=types)) if typed else None, cut


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Check that a tokenizer fits a model with ``vocab_size`` tokens.

    Raises:
        InputError: if its ids are too large, or it lacks a padding token or a special token before text.
    """
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise InputError(
            "tokenizer",
            f"it has ids up to {largest}, but the model has {vocab_size} tokens; it belongs to another model",
        )
    if tokenizer.pad_token_id is None:
        raise InputError("tokenizer", "it has no padding token ([PAD] in BERT)")
    if tokenizer("text")["input_ids"][0] not in (tokenizer.cls_token_id, tokenizer.bos_token_id):
        raise InputError("tokenizer", "it puts no special token before text ([CLS] in BERT), which the model reads")
