"""What pages say about the source, held to be true.

- Role ``path``: the path of a file or folder of the repository; a path that does not exist is a warning.
- Directive ``files``: the modules of a package, each with the first sentence of its docstring.
"""

import ast
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "whereformer"

_log = logging.getLogger(__name__)


class FileRole(SphinxRole):
    """A path from the root of the repository, or from the package's."""

    def run(self):
        if not any((root / self.text).exists() for root in (ROOT, PACKAGE)):
            _log.warning("no such file: %s", self.text, location=self.get_location())
        return [nodes.literal(text=self.text)], []


def summary(file):
    """The first sentence of a module's docstring."""
    first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
    return " ".join(first.split())


class Files(SphinxDirective):
    """A table of a package's modules and packages."""

    required_arguments = 1

    def run(self):
        folder = PACKAGE / self.arguments[0]
        lines = [f"| In `{self.arguments[0]}/` | |", "| --- | --- |"]
        for file in sorted(folder.iterdir()):
            init = file / "__init__.py"
            source = init if init.exists() else file
            if source.suffix != ".py" or file.name == "__init__.py":
                continue
            self.env.note_dependency(str(source))
            name = f"{file.name}/" if init.exists() else file.name
            lines.append(f"| `{name}` | {summary(source).replace('``', '`').replace('|', chr(92) + '|')} |")
        container = nodes.container()
        self.state.nested_parse(StringList(lines, source=self.env.docname), self.content_offset, container)
        return container.children


def setup(app):
    """Register the role and the directive."""
    app.add_role("path", FileRole())
    app.add_directive("files", Files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
