"""Docstrings of this project as reStructuredText: sections that Google's style does not know become paragraphs."""

import re

SECTION = re.compile(r"(Shape|Extrapolation|Cost|Source|Where transformers goes by other conventions)\b([^:]*):(.*)")


def _paragraphs(app, what, name, obj, options, lines):
    """Turn "Shape:" and the indented lines below it into one paragraph, and the like."""
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


def setup(app):
    """Work before napoleon, which reads what is left."""
    app.connect("autodoc-process-docstring", _paragraphs, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
