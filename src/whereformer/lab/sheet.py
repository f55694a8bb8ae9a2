"""A sheet: a table of cells that is drawn for terminals, notebooks, HTML pages and Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from ..errors import join_words

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
MAX_WORD = 24
"""Letters of a word that a terminal keeps in one line in any case."""


@dataclass(frozen=True)
class Column:
    """A column."""

    name: str  # the header
    detail: str = ""  # a smaller line below the header
    left: bool = False  # whether its text begins at the left, as words do and numbers do not
    wraps: bool = False  # whether long text may take several lines on a page
    aligned: bool = False  # whether letters of several texts have to stand below each other, so that no line breaks
    optional: bool = False  # whether terminals without room for all columns leave it out before others


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
    folded: bool = False  # whether it is on pages only, where a click opens it
    page_only: bool = False  # whether terminals and notebooks leave it out
    # The look of some rows, by their index: "best" stands out on a page, "dim" is only for comparison.
    looks: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, title: str, columns: Sequence[Column | str], rows: Sequence[Sequence[Cell | str]], **fields: Any
    ) -> Sheet:
        """Make a sheet. Columns and cells that have only text can be strings."""
        heads = [column if isinstance(column, Column) else Column(column) for column in columns]
        heads = [
            replace(head, left=head.left or index == fields.get("name_column", 0)) for index, head in enumerate(heads)
        ]
        full = [tuple(cell if isinstance(cell, Cell) else Cell(cell, order=cell) for cell in row) for row in rows]
        return cls(title, tuple(heads), tuple(full), **fields)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Draw the sheet. Where the terminal has no room, columns are left out, and texts break between words."""
        from rich import box
        from rich.styled import Styled
        from rich.table import Table

        # Strings, not rich's texts: the terminal escapes what strings from outside hold.
        yield Styled(self.title, "bold")
        heads, *rows = texts = self._texts("{}\n{}")
        widths = self._fit(texts, options.max_width)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(heads))
        for index, width in widths.items():
            justify: Literal["left", "right"] = "left" if self.columns[index].left else "right"
            table.add_column(heads[index], justify=justify, overflow="fold", width=width)
        for number, row in enumerate(rows):
            style = "dim" if self.looks.get(number) == "dim" else None
            table.add_row(*(row[index] for index in widths), style=style)
        yield table
        if left_out := [head.replace("\n", " ") for index, head in enumerate(heads) if index not in widths]:
            yield Styled(f"The terminal has no room for {join_words(left_out)}; report.md has all columns.", "dim")
        yield from (Styled(note, "dim") for note in self.notes)

    def _texts(self, form: str) -> list[list[str]]:
        """Return the texts of the header and of each row. ``form``, such as "{} ({})", joins a text with its detail."""
        rows = [[(column.name, column.detail) for column in self.columns]]
        rows += [[(cell.text, cell.detail) for cell in row] for row in self.rows]
        return [[form.format(text, detail) if detail else text for text, detail in row] for row in rows]

    def _fit(self, texts: Sequence[Sequence[str]], max_width: int) -> dict[int, int]:
        """Return the columns that have room next to each other, with their widths.

        The last of the optional columns is left out first, and the column with the rows' names last. Only columns with
        text may break, between words.
        """
        from rich.cells import cell_len

        widths, smallest = dict[int, int](), dict[int, int]()
        for index, cells in enumerate(zip(*texts, strict=True)):
            lines = "\n".join(cells).split("\n")
            widths[index] = smallest[index] = max(map(cell_len, lines))
            if self.columns[index].left and not self.columns[index].aligned:
                smallest[index] = min(max(map(cell_len, " ".join(lines).split()), default=0), MAX_WORD)
        order = sorted(widths, key=lambda index: (index == self.name_column, not self.columns[index].optional, -index))
        room, gap = max_width + 1, 3  # a column has a gap behind it, and the edges are two less
        while len(widths) > 1 and sum(smallest[index] + gap for index in widths) > room:
            del widths[order.pop(0)]
        while sum(width + gap for width in widths.values()) > room:
            wide = [index for index in widths if widths[index] > smallest[index]]
            if not wide:  # a single column, which is folded
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
        return widths

    def csv(self) -> str:
        """Return the table as comma-separated values: numbers with all digits, and details in a column next to them."""
        columns = list[list[float | str]]()
        for index, column in enumerate(self.columns):
            cells = [row[index] for row in self.rows]
            values = [cell.text if cell.order is None or isinstance(cell.order, str) else cell.order for cell in cells]
            columns.append([f"{column.name} {column.detail}".strip(), *values])
            if any(cell.detail for cell in cells):
                columns.append(["detail", *(cell.detail for cell in cells)])
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(zip(*columns, strict=True))
        return file.getvalue()

    def markdown(self) -> list[str]:
        """Return the table's lines in Markdown. Details stand in parentheses."""
        heads, *rows = [[text.replace("|", "\\|") for text in row] for row in self._texts("{} ({})")]
        bars = ["---" if column.left else "---:" for column in self.columns]
        return [f"| {' | '.join(line)} |" for line in (heads, bars, *rows)]


def plain(number: float) -> str:
    """Format a number as short as possible, with up to six digits and a real minus sign."""
    return f"{number:z.6g}".replace("-", MINUS)


def decimals(number: float, style: str = ".3f") -> str:
    """Format a number with a fixed number of decimals, or in percent; a dash if it is not finite."""
    return f"{number:z{style}}".replace("-", MINUS) if math.isfinite(number) else DASH
