"""Writes docs/architecture/files.md: every module of the package, with the first sentence of its docstring.

Run: python docs/_ext/files.py
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "whereformer"
PAGE = ROOT / "docs" / "architecture" / "files.md"
LINK = "../../src/whereformer"

HEAD = """\
# Files

Every module of the package, with the first sentence of its docstring. Names are relative to `src/whereformer/`, and
each is a link to the file. To update this page after a change, run `python docs/_ext/files.py`.
"""


def first_sentence(file):
    """The first sentence of a module's docstring, as Markdown."""
    paragraph = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
    sentence = re.split(r"(?<=[.])\s+(?=[A-Z`])", " ".join(paragraph.split()))[0]
    sentence = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", sentence).replace("``", "`")
    return sentence.replace("|", r"\|")


def page(package=PACKAGE):
    """The text of the page."""
    folders = [package, *sorted(file.parent for file in package.rglob("__init__.py") if file.parent != package)]
    parts = [HEAD]
    for folder in folders:
        name = folder.relative_to(package).as_posix()
        title = "The package itself" if folder == package else f"`{name}/`"
        prefix = LINK if folder == package else f"{LINK}/{name}"
        files = [file for file in sorted(folder.glob("*.py")) if file.name != "__init__.py"]
        rows = [f"| [`{file.name}`]({prefix}/{file.name}) | {first_sentence(file)} |" for file in files]
        parts.append(f"## {title}\n\n{first_sentence(folder / '__init__.py')}")
        if rows:
            parts.append("\n".join(["| File | What it does |", "|---|---|", *rows]))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
