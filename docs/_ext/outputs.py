"""Writes what the Python of pages prints below it. A block of Python with output is followed by a block of text.

Run: python docs/_ext/outputs.py README.md docs/guides/own-model.md ...
"""

import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE)


def page(text):
    """Run a page's blocks of Python, one after another as a reader does, and return the page with what each prints."""
    module = sys.modules["page"] = ModuleType("page")  # where dataclasses look for their annotations

    def run(found):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(found[1], module.__dict__)
        shown = f"\n```text\n{output.getvalue()}```\n" if output.getvalue() else ""
        return f"```python\n{found[1]}```\n{shown}"

    return BLOCK.sub(run, text)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
