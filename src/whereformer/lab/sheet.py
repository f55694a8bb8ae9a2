"""A sheet: a table of cells that is drawn for terminals, notebooks, HTML pages and Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Column:
    """A column."""

    name: str  # the header
    detail: str = ""  # a smaller line below the header
    left: bool = False  # whether its text begins at the left, as words do and numbers do not
    wraps: bool = False  # whether long text may take several lines on a page


@dataclass(frozen=True)
class Cell:
    """A cell."""

    text: str
    detail: str = ""  # a smaller line below
    order: float | str | None = None  # the value to sort by. Cells without one stay last in both directions
    title: str = ""  # the text that a page shows when a pointer is over the cell
    style: str = ""  # the colors on a page, as CSS

    @classmethod
    def of_seeds(
        cls, values: Sequence[float], show: Callable[[float], str], end: Callable[[float], str] | None, **fields: Any
    ) -> Cell:
        """Return the cell of a median over seeds; its range is below, if the ends are shown and differ."""
        low, high = min(values), max(values)
        spread = f"{end(low)}{DASH}{end(high)}" if end is not None and low != high else ""
        return cls(show(median(values)), spread, median(values), **fields)


@dataclass(frozen=True)
class Sheet:
    """A table with its title, and notes below that say how to read it."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()  # sentences below the table
    name_column: int = 0  # the index of the column with the rows' names
    sortable: bool = False  # whether readers of a page can sort it
    folded: bool = False  # whether it is on pages only, where a click opens it
    # The look of some rows, by their index: "best" stands out on a page, "dim" is only for comparison.
    looks: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, title: str, columns: Sequence[Column | str], rows: Sequence[Sequence[Cell | str]], **fields: Any
    ) -> Sheet:
        """Make a sheet. Columns and cells that have only text can be strings."""
        heads = [column if isinstance(column, Column) else Column(column) for column in columns]
        full = [tuple(cell if isinstance(cell, Cell) else Cell(cell, order=cell) for cell in row) for row in rows]
        return cls(title, tuple(heads), tuple(full), **fields)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Draw the sheet. Cells take several lines where the terminal has no room for them."""
        from rich import box
        from rich.styled import Styled
        from rich.table import Table

        # Strings, not rich's texts: the terminal escapes what strings from outside hold.
        yield Styled(self.title, "bold")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(column.name for column in self.columns))
        for index, column in enumerate(self.columns):
            left = column.left or index == self.name_column
            name = _lines(column.name, column.detail)
            table.add_column(name, justify="left" if left else "right", overflow="fold")
        for number, row in enumerate(self.rows):
            texts = (_lines(cell.text, cell.detail) for cell in row)
            table.add_row(*texts, style="dim" if self.looks.get(number) == "dim" else None)
        yield table
        yield from (Styled(note, "dim") for note in self.notes)

    def markdown(self) -> list[str]:
        """Return the table's lines in Markdown. Details stand in parentheses."""
        heads = [_with_detail(column.name, column.detail) for column in self.columns]
        rows = [[_with_detail(cell.text, cell.detail) for cell in row] for row in self.rows]
        is_left = [column.left or index == self.name_column for index, column in enumerate(self.columns)]
        bars = ["---" if left else "---:" for left in is_left]
        return [f"| {' | '.join(line)} |" for line in (heads, bars, *rows)]


def _lines(text: str, detail: str) -> str:
    return f"{text}\n{detail}" if detail else text


def _with_detail(text: str, detail: str) -> str:
    return (f"{text} ({detail})" if detail else text).replace("|", "\\|")


def plain(number: float) -> str:
    """Format a number as short as possible, with up to six digits and a real minus sign."""
    return f"{number:z.6g}".replace("-", MINUS)


def signed(number: float) -> str:
    """Format a number with its sign, as offsets are written; 0 has none."""
    return f"{number:+g}".replace("-", MINUS) if number else "0"


def decimals(number: float, style: str = ".3f") -> str:
    """Format a number with a fixed number of decimals, or in percent; a dash if it is not finite."""
    return f"{number:z{style}}".replace("-", MINUS) if math.isfinite(number) else DASH
