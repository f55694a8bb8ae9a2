"""Lists every module of the package on the page architecture/files, while the site is built."""

import ast
import re
from pathlib import Path

PAGE = "architecture/files"
PACKAGE = Path(__file__).parents[2] / "src" / "whereformer"
LINK = "../../src/whereformer"


def first_sentence(file):
    """The first sentence of a module's docstring, as Markdown."""
    paragraph = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
    sentence = re.split(r"(?<=[.])\s+(?=[A-Z`])", " ".join(paragraph.split()))[0]
    sentence = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", sentence).replace("``", "`")
    return sentence.replace("|", r"\|")


def tables():
    """A section for each folder of the package, with a table of its modules, as Markdown."""
    folders = [PACKAGE, *sorted(file.parent for file in PACKAGE.rglob("__init__.py") if file.parent != PACKAGE)]
    parts = []
    for folder in folders:
        name = folder.relative_to(PACKAGE).as_posix()
        title = "The package itself" if folder == PACKAGE else f"`{name}/`"
        prefix = LINK if folder == PACKAGE else f"{LINK}/{name}"
        files = [file for file in sorted(folder.glob("*.py")) if file.name != "__init__.py"]
        rows = [f"| [`{file.name}`]({prefix}/{file.name}) | {first_sentence(file)} |" for file in files]
        parts.append(f"## {title}\n\n{first_sentence(folder / '__init__.py')}")
        if rows:
            parts.append("\n".join(["| File | Purpose |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _add_tables(app, docname, source):
    if docname == PAGE:
        source[0] += f"\n{tables()}\n"


def _is_outdated(app, env, added, changed, removed):
    """The page depends on docstrings, which Sphinx does not watch, so every build reads it again."""
    return [PAGE]


def setup(app):
    """Add the tables before the page is parsed."""
    app.connect("source-read", _add_tables)
    app.connect("env-get-outdated", _is_outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
