"""Torch's private names change without notice: those that the package uses stand in one file, and are listed here."""

import ast
from collections import defaultdict
from functools import cache

from .source import NAME, imports, modules

USED = {
    f"{NAME}.kernels.torch_private": {
        "_AutoDispatchBelowAutograd",
        "_C",
        "_ForceDispatchKeyGuard",
        "_current_level",
        "_dispatch_tls_local_exclude_set",
        "_dispatch_tls_local_include_set",
        "_functorch",
        "_gradient_checkpointing_func",
        "_init_amx",
        "_is_amx_tile_supported",
        "_is_avx512_bf16_supported",
        "_len_torch_dispatch_stack",
        "_python_dispatch",
        "_pytree",
        "_version",
    },
    # Of other people's models, whose insides are the business of what attaches position methods to them.
    f"{NAME}.models.attachment": {
        "_apply_chunk_attention",
        "_apply_rotary_embedding",
        "_attn_implementation",
        "_buffers",
        "_can_set_attn_implementation",
        "_from_config",
        "_relative_position_bucket",
        "_relative_positions_bucket",
    },
    # Of sentence-transformers.
    f"{NAME}.models.unpadding": {"_infer_flatten_position_offset"},
    # Python documents this one.
    f"{NAME}.lab": {"_exit"},
}


NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}
"""Python documents these, and their underscore only keeps them apart from a tuple's fields."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NAMED_TUPLE


@cache
def own_names() -> set[str]:
    """Every name that a module, a class, a function or an assignment of the package has, except members of protocols.

    A protocol describes an object of a library.
    """
    names = {part for module in modules() for part in module.split(".")}
    for tree in modules().values():
        nodes = [*ast.walk(tree)]
        protocols = [
            node for node in nodes if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
        ]
        members = {id(member) for protocol in protocols for node in protocol.body for member in ast.walk(node)}
        for node in nodes:
            if id(node) in members:
                continue
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def private_names(module: str) -> set[str]:
    """The private attributes and imported names that a module uses, and the package does not give."""
    names = {part for base, name in imports(module) for part in (*base.split("."), name or "")}
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            names.add(str(getattr(node.args[1], "value", "")))
    return set(filter(is_private, names)) - own_names()


def found_by_place() -> dict[str, set[str]]:
    """The private names of libraries, by the place of ``USED`` or else the module that uses them."""
    by_place: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        entry = next((entry for entry in USED if f"{module}.".startswith(f"{entry}.")), module)
        by_place[entry] |= private_names(module)
    return {entry: names for entry, names in by_place.items() if names}


def test_private_names_of_libraries_stand_where_they_are_listed():
    assert found_by_place() == USED
