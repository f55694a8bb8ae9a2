"""No function is too long to be read at once, and none takes more than a person keeps in mind."""

import ast
from collections.abc import Callable

from .source import NAME, functions, modules

LINES = 80
PARAMETERS = 10


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring, which may explain many options."""
    assert function.end_lineno is not None
    text = ast.get_docstring(function, clean=False)
    return function.end_lineno - function.lineno + 1 - (0 if text is None else len(text.split("\n")))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    named = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")]) + bool(given.vararg) + bool(given.kwarg)


def is_configuration(name: str) -> bool:
    """Whether a function builds a configuration: the constructor of a class whose name ends in ``Config``.

    Its parameters are a model's options, one a line. Settings are dataclasses, whose constructors nobody writes.
    """
    return name.endswith("Config.__init__")


def above(limit: int, measure: Callable[[ast.FunctionDef | ast.AsyncFunctionDef], int], outside: str) -> dict[str, int]:
    """The functions whose measure is above the limit, by their names, but for those of one subpackage."""
    sizes = {
        f"{module}.{name}": measure(function)
        for module in modules()
        if not module.startswith(f"{NAME}.{outside}")
        for name, function in functions(module)
    }
    return {name: size for name, size in sizes.items() if size > limit}


def test_no_function_is_too_long():
    """Triton's kernels may be: a kernel is one function, and what it inlines pays for each argument."""
    assert above(LINES, length, outside="kernels.triton") == {}


def test_no_function_takes_too_many_parameters():
    """Kernels may: attention has as many arguments as it has, and a kernel can be given no objects."""
    found = above(PARAMETERS, parameters, outside="kernels")
    assert {name: number for name, number in found.items() if not is_configuration(name)} == {}
