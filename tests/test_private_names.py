"""Torch's private names change without notice: those that the package uses stand in one file, and are listed here."""

import ast
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
        "_is_mkldnn_bf16_supported",
        "_len_torch_dispatch_stack",
        "_python_dispatch",
        "_pytree",
        "_schema",
    },
    # Of other people's models, whose insides are the business of what attaches position methods to them.
    f"{NAME}.models.attachment": {
        "_apply_chunk_attention",
        "_apply_rotary_embedding",
        "_attn_implementation",
        "_buffers",
        "_from_config",
        "_get_output_attention_mask",
        "_relative_position_bucket",
        "_relative_positions_bucket",
    },
    # Of sentence-transformers.
    f"{NAME}.models.unpadding": {"_infer_flatten_position_offset"},
    # Python documents this one.
    f"{NAME}.lab": {"_exit"},
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def own_names() -> set[str]:
    """Every name that a module, a class, a function or an assignment of the package has."""
    found = {part for module in modules() for part in module.split(".")}
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def private_names(module: str) -> set[str]:
    """The private attributes and imported names that a module uses, and the package does not give."""
    found = {part for base, name in imports(module) for part in (*base.split("."), name or "")}
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            found.add(str(getattr(node.args[1], "value", "")))
    return set(filter(is_private, found)) - own_names()
