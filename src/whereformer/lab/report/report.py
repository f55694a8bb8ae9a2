"""A report: sentences, sheets and figures, drawn for a terminal, a notebook, a page and Markdown."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...files import write_atomically
from ...version import __version__
from ..sheet import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas
    from rich.console import RenderableType

TEMPLATES = Path(__file__).parent / "templates"
DOCS = "https://github.com/whereformer/whereformer/blob/main/docs"
"""Where the pages of the documentation are."""


@dataclass(frozen=True)
class Figure:
    """A drawing.

    Args:
        title: its title.
        paint: fills an empty figure of matplotlib, with the colors of :mod:`.figures`.
        caption: how to read it.
        size: width and height in CSS pixels. Three quarters of the usual width fit a phone.
        folded: whether a click opens it.
        look: a sentence and the scores by position of each head, for a page on which one points at a token.
    """

    title: str
    paint: Callable[[Canvas], None]
    caption: str = ""
    size: tuple[int, int] = (420, 300)
    folded: bool = False
    look: Mapping[str, Any] | None = None

    @cached_property
    def svg(self) -> str:
        """The drawing as an SVG file, in the colors that stand for others."""
        from .figures import draw

        return draw(*self.size, self.paint)


@dataclass(frozen=True)
class Report:
    """The results of a recipe.

    Args:
        title: the question.
        sentences: the conclusions. The first is the answer.
        sections: sheets and figures.
        values: the recipe's results, by key.
        command: the command line that repeats it.
        facts: options and machine, by the names of these groups.
        advice: the reason to run another command; empty if no command is advised.
        next_command: that command.
        problem: the error that a command ends with although there is a report; empty if there is none.
        numbers: the file with all numbers, in the folder of the page.
        methods: text with the names of the position methods that it is about.
        guide: the page of the documentation that explains it, such as "guides/compare"; empty if there is none.
    """

    title: str
    sentences: Sequence[str]
    sections: Sequence[Sheet | Figure] = ()
    values: Mapping[Any, Any] = field(default_factory=dict)
    command: str = ""
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    advice: str = ""
    next_command: str = ""
    problem: str = ""
    numbers: str = "records.jsonl"
    methods: str = ""
    guide: str = ""

    @property
    def files(self) -> list[str]:
        """The name of each section's file, by its title; "" for a table without names of columns."""
        names: list[str] = []
        for section in self.sections:
            name = re.sub("[^a-z0-9]+", "-", section.title.lower()).strip("-")[:60] or "part"
            name += ".csv" if isinstance(section, Sheet) else ".svg"
            has_file = not isinstance(section, Sheet) or any(column.name for column in section.columns)
            # Titles may differ only in characters that a file's name does not have.
            names.append((f"{len(names)}-{name}" if name in names else name) if has_file else "")
        return names

    @property
    def links(self) -> dict[str, str]:
        """The addresses of pages about the report and its methods, by name; methods of plugins have none."""
        from ...positions import position_names

        pages = {"how to read this": self.guide} if self.guide else {}
        words = {*re.findall(r"\w+", self.methods)} - {"none"}
        pages |= {name: f"methods/{name}" for name in position_names() if name in words}
        return {name: f"{DOCS}/{page}.md" for name, page in pages.items()}

    @property
    def sheets(self) -> list[Sheet]:
        """The sheets that a terminal and a notebook show."""
        sheets = [section for section in self.sections if isinstance(section, Sheet)]
        return [sheet for sheet in sheets if not (sheet.folded or sheet.page_only)]

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.styled import Styled

        # Strings, not rich's texts: the terminal escapes what strings from outside hold.
        tables = [part for sheet in self.sheets for part in (sheet, "")]
        return Group(*tables, Styled(self.sentences[0], "bold"), *self.sentences[1:])

    def __str__(self) -> str:
        from rich.console import Console

        file = io.StringIO()
        Console(file=file, width=100, markup=False, emoji=False, highlight=False).print(self)
        return file.getvalue() + (f"{self.format_next()}\n" if self.next_command else "")

    def format_next(self) -> str:
        """Return the advice and the next command in two lines, which must not be wrapped: the command can be copied."""
        return f"{self.advice}:\n{self.next_command}"

    def _repr_html_(self) -> str:
        return _render("fragment.html.j2", report=self)

    def page(self) -> str:
        """Return the report as a page that loads no other file. Equal reports give identical pages."""
        from .figures import inline

        sections = []
        for number, (section, file) in enumerate(zip(self.sections, self.files, strict=True), 1):
            name = f"part-{number}"
            drawing = inline(section.svg, name, section.title) if isinstance(section, Figure) else None
            sections.append((name, section, drawing, file))
        return _render("report.html.j2", report=self, sections=sections)

    def markdown(self) -> str:
        """Return the report in Markdown. Its figures are files in the same folder."""
        answer, *details = self.sentences
        lines = [f"# {self.title}", f"**{answer}**", *details]
        if self.next_command:
            lines.append(f"{self.advice}: `{self.next_command}`")
        for section, file in zip(self.sections, self.files, strict=True):
            if isinstance(section, Sheet):
                lines += [f"## {section.title}", "\n".join(section.markdown()), *section.notes]
            else:
                caption = [section.caption] if section.caption else []
                lines += [f"## {section.title}", f"![{section.title}]({file})", *caption]
        lines += [f"`{self.command}`"] if self.command else []
        links = ", ".join(f"[{name}]({address})" for name, address in self.links.items())
        return "\n\n".join([*lines, *([f"Read more: {links}."] if links else [])]) + "\n"

    def write(self, folder: str | Path) -> list[Path]:
        """Write the page, the Markdown, its figures and tables to a folder, and return their paths, these first."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = {"report.html": self.page(), "report.md": self.markdown()}
        for section, name in zip(self.sections, self.files, strict=True):
            from .figures import printed

            if name:
                files[name] = section.csv() if isinstance(section, Sheet) else printed(section.svg)
        for name, content in files.items():
            write_atomically(folder / name, content)
        return [folder / name for name in files]


def _render(template: str, **content: Any) -> str:
    """Render a template. All text except Markup is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(version=__version__, **content) + "\n"
