"""Converts docstrings: sections that Google's style does not define become paragraphs; and leaves out overloads."""

import re

from sphinx.pycode import ModuleAnalyzer

SECTION = re.compile(r"(Shape|Extrapolation|Cost|Source|Where transformers goes by other conventions)\b([^:]*):(.*)")


def _paragraphs(app, what, name, obj, options, lines):
    """Turn "Shape:" and similar headings, with the indented lines below them, into one paragraph each."""
    result, inside = [], False
    for line in lines:
        begins = SECTION.fullmatch(line)
        if begins:
            inside = True
            result += ["", f"**{begins[1]}{begins[2]}:**{begins[3]}"]
        elif inside and line.startswith("    "):
            result.append(line.strip())
        else:
            if inside and line.strip():
                result.append("")
            inside = False
            result.append(line)
    lines[:] = result


def _without_overloads(analyze):
    """Let autodoc show a function's own signature, which lists all options, in place of its overloads."""

    def analyzed(self):
        analyze(self)
        self.overloads = {}

    return analyzed


def setup(app):
    """Run before napoleon, which converts the other sections."""
    setattr(ModuleAnalyzer, "analyze", _without_overloads(ModuleAnalyzer.analyze))  # noqa: B010  # for mypy
    app.connect("autodoc-process-docstring", _paragraphs, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
