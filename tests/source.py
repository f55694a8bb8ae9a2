"""The package's source as syntax trees: what its modules import, and which functions they have."""

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import whereformer

PACKAGE = Path(whereformer.__file__).parent
NAME = whereformer.__name__


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of every module of the package, by its dotted name."""
    # Half a million nodes stay, and none of them is garbage that is worth looking for, now or later.
    gc.disable()
    try:
        return {_name(file): ast.parse(file.read_text(encoding="utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}
    finally:
        gc.freeze()
        gc.enable()


def _name(file: Path) -> str:
    parts = (NAME, *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_package(module: str) -> bool:
    return any(name.startswith(f"{module}.") for name in modules())


def imports(module: str) -> Iterator[tuple[str, str | None]]:
    """All imports of a module, also inside functions: a dotted name, and the name taken from it (None: itself)."""
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            yield from ((base, alias.name) for alias in node.names)


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        assert node.module is not None
        return node.module
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package(module)]
    return ".".join([*parts, *([node.module] if node.module else [])])
