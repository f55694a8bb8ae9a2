"""Converts docstrings: sections that Google's style does not define become paragraphs; and leaves out overloads.

Signatures of configurations begin with our fields, in the order of their docstrings.
"""

import inspect
import re

from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import stringify_signature
from transformers import PreTrainedConfig

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


def _own_fields_first(app, what, name, obj, options, signature, returns):
    """List the fields that a configuration's docstring describes, in its order, then the others, transformers' last."""
    if what != "class" or not issubclass(obj, PreTrainedConfig):
        return None
    arguments = re.findall(r"^    ([a-z][\w, ]*):", inspect.getdoc(obj) or "", re.MULTILINE)
    described = [field for names in arguments for field in names.split(", ")]

    def rank(parameter):
        is_ours = parameter.kind is parameter.KEYWORD_ONLY
        return not is_ours, described.index(parameter.name) if parameter.name in described else len(described)

    parameters = sorted(inspect.signature(obj).parameters.values(), key=rank)
    keywords = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters]
    return stringify_signature(inspect.Signature(keywords), unqualified_typehints=True), returns


def setup(app):
    """Run before napoleon, which converts the other sections."""
    setattr(ModuleAnalyzer, "analyze", _without_overloads(ModuleAnalyzer.analyze))  # noqa: B010  # for mypy
    app.connect("autodoc-process-docstring", _paragraphs, priority=400)
    app.connect("autodoc-process-signature", _own_fields_first)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
