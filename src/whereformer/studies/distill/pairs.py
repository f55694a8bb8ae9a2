"""Read pairs of texts with a number for how similar they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...data.read import open_table
from ...errors import InputError, shown, some_of


@dataclass(frozen=True)
class LikenessPairs:
    """Pairs of texts with a number for how similar they are. A good model's cosines rank them in the same order.

    Args:
        source: where they come from.
        texts: the two columns of texts.
        likeness: how similar each pair is.
    """

    source: str
    texts: tuple[list[str], list[str]]
    likeness: list[float]


def read_pairs(file: Path, text: str | None, label: str | None) -> LikenessPairs:
    """Read pairs from a table.

    Raises:
        InputError: if the file can't be read, a column is missing, or a label is not a number.
    """
    names = [part.strip() for part in (text or "").split(",") if part.strip()]
    if len(names) != 2:
        raise InputError("text", f"expected two columns, such as a,b, got {shown(text)}")
    if label is None:
        raise InputError("label", "expected the column that says how similar the texts are, got none")
    table = open_table("pairs", file, names)
    for field, name in (("text", names[0]), ("text", names[1]), ("label", label)):
        if name not in table.names:
            raise InputError(field, f"{file} has no column {shown(name)}; it has {some_of(table.names)}")
    likeness = table.column(label)
    if len(likeness) < 2:
        raise InputError("pairs", f"expected at least 2 rows, {file} has {len(likeness)}")
    for row, value in enumerate(likeness):
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
            raise InputError("label", f"expected numbers, got {shown(value)} in row {row + 1} of {file}")
    texts = [[str(value or "") for value in table.column(name)] for name in names]
    return LikenessPairs(str(file), (texts[0], texts[1]), [float(value) for value in likeness])
