"""Imports point one way, and each package needs no library that is not its own business. Lazy imports count too."""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from .source import NAME, imports, modules

LAYERS = (
    {"checks", "errors", "files", "version", "_extras"},
    {"kernels"},
    {"manifest", "provenance", "ranks"},
    {"positions"},
    {"models"},
    {"data"},
    {"analysis"},
    {"lab"},
    {"recipes"},
    {"cli"},
    {"__main__"},
)
"""From below to above. A module imports from its own layer or from one below."""

HUGGING_FACE = {"huggingface_hub", "safetensors", "tokenizers", "transformers"}
DRAWING = {"jinja2", "markupsafe", "matplotlib", "numpy"}
LIBRARIES = {
    NAME: {"torch"},
    "kernels": {"torch", "triton"},
    "provenance": {"torch"},
    "ranks": {"torch", "filelock"},
    "positions": {"torch"},
    "models": {"torch", *HUGGING_FACE},
    "analysis": {"torch", "numpy", "scipy", "sklearn", *HUGGING_FACE},
    "data": {"torch", "numpy", "datasets", "pyarrow", *HUGGING_FACE},
    "lab": {"torch", "ray", "rich", "sacrebleu", *DRAWING, *HUGGING_FACE},
    "recipes": {"torch", *DRAWING, *HUGGING_FACE},
    "cli": {"torch", "rich", *HUGGING_FACE},
}
"""What a package may import besides the standard library. The command line's own libraries are the command line's."""


def package_of(module: str) -> str:
    """The part of a module's name that has a layer; the root's own is the package's."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else module


def own_imports(module: str) -> set[str]:
    """The package's modules that a module imports."""
    targets = {(base, name) for base, name in imports(module) if base.split(".")[0] == NAME}
    return {f"{base}.{name}" if f"{base}.{name}" in modules() else base for base, name in targets} - {module}


def libraries(module: str) -> set[str]:
    """The libraries outside the standard one that a module imports; jaxtyping serves type checkers and tests alone."""
    return {base.split(".")[0] for base, _ in imports(module)} - {NAME, "jaxtyping"} - sys.stdlib_module_names


def cycles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """The largest sets of nodes that all lead to one another, by two nodes or more."""

    def reached(start: str) -> set[str]:
        nodes: set[str] = set()
        todo = list(graph.get(start, ()))
        while todo:
            if (node := todo.pop()) not in nodes:
                nodes.add(node)
                todo += graph.get(node, ())
        return nodes

    reach = {node: reached(node) for node in graph}
    circles = {
        frozenset({node, *(target for target in reach[node] if node in reach.get(target, ()))})
        for node in graph
        if node in reach[node]
    }
    return [set(circle) for circle in circles if len(circle) > 1]


def short(module: str) -> str:
    return module.removeprefix(f"{NAME}.")


def found_violations() -> set[tuple[str, str]]:
    level = {package: number for number, layer in enumerate(LAYERS) for package in layer}
    level[NAME] = level["recipes"]  # the root shows the library, and a function for each study
    violations = set()
    for module in modules():
        package = package_of(module)
        upward = {
            target
            for target in own_imports(module)
            if level[package_of(target)] > level[package] or (package_of(target) == NAME and package != "__main__")
        }
        foreign = libraries(module) - LIBRARIES.get(package, set())
        violations |= {(short(module), short(target)) for target in upward | foreign}
    return violations


def test_every_package_has_a_layer():
    assert {package_of(module) for module in modules()} - {NAME} == set().union(*LAYERS)


def test_the_drawing_shows_the_layers():
    drawing = (Path(__file__).parents[1] / "docs/architecture/layers.svg").read_text(encoding="utf-8")
    rows = re.findall(r'class="h" text-anchor="start">(.*?)<', drawing)
    assert [set(row.split(", ")) for row in rows] == list(reversed(LAYERS))


def test_imports_point_one_way_and_libraries_stay_where_they_belong():
    assert found_violations() == set(), "a module imports from a layer above it, or a library that is not its own"


def test_packages_do_not_import_one_another_in_a_circle():
    graph: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        for target in own_imports(module):
            if package_of(target) != package_of(module):
                graph[package_of(module)].add(package_of(target))
    assert cycles(graph) == []


def test_modules_do_not_import_one_another_in_a_circle():
    graph: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        graph[module] |= own_imports(module)
    assert cycles(graph) == []
