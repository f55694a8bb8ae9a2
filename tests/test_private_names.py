"""Torch's private names change without notice: those that the package uses stand in one file, and are listed here."""

import ast
from collections.abc import Iterable
from functools import cache

import pytest

from .source import NAME, functions, imports, modules

GATHERED = f"{NAME}.kernels.torch_private"
"""The one module that may use them."""

USED = {
    "torch._C.DispatchKey.AutogradCPU",
    "torch._C.DispatchKey.AutogradOther",
    "torch._C.DispatchKeySet",
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._ForceDispatchKeyGuard",
    "torch._C._dispatch_tls_local_exclude_set",
    "torch._C._dispatch_tls_local_include_set",
    "torch._C._functorch.TransformType",
    "torch._C._functorch.get_interpreter_stack",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._len_torch_dispatch_stack",
    "torch.autograd.forward_ad._current_level",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_leaves",
}

"""Of its modules, by their whole names."""

USED_OF_OBJECTS = {
    "_gradient_checkpointing_func",
    "_schema",
}
"""Of its tensors, modules and operators."""

USED_OF_MODELS = {
    "_apply_rotary_embedding",
    "_attn_implementation",
    "_buffers",
    "_can_set_attn_implementation",
    "_from_config",
    "_relative_position_bucket",
}
"""Of other people's models, whose insides are the business of what attaches position methods to them."""

USED_OF_OTHERS = {"_infer_flatten_position_offset"}
"""Of sentence-transformers; one module has it."""


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def names_of_torch(tree: ast.AST, imported: Iterable[tuple[str, str | None]]) -> Iterable[str]:
    """The dotted names below torch that a module uses, each as long as it is written in one place."""
    known = {"torch": "torch"}
    for base, name in imported:
        if base.split(".")[0] == "torch":
            yield f"{base}.{name}" if name else base
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            known |= {
                alias.asname: alias.name for alias in node.names if alias.asname and alias.name.startswith("torch")
            }

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
            return f"{base}.{node.attr}"
        return None

    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner and (name := dotted(node)):
            yield name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            base, attribute = dotted(node.args[0]), node.args[1]
            if base and isinstance(attribute, ast.Constant):
                yield f"{base}.{attribute.value}"


@cache
def private_names_of_torch(module: str) -> set[str]:
    return set(filter(is_private, names_of_torch(modules()[module], imports(module))))


@cache
def private_attributes(module: str) -> set[str]:
    """Private attributes of objects that a module uses, and no class of the package has."""
    tree = modules()[module]
    of_modules = {part for name in private_names_of_torch(module) for part in name.split(".")}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)}
    # Python documents this one.
    return attributes - of_modules - own_names() - {"_exit"}


@cache
def own_names() -> set[str]:
    """Every name that a class, a function or an assignment of the package gives."""
    found = {name.rsplit(".", 1)[-1] for module in modules() for name, _ in functions(module)}
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch._C.f()", {"torch._C.f"}),
        ("torch.__version__", set()),
        ("from torch.nn import functional as F\nF._pad(x)", {"torch.nn.functional._pad"}),
        ("import torch._dynamo", {"torch._dynamo"}),
        ("from torch.utils._pytree import tree_map", {"torch.utils._pytree.tree_map"}),
        ("hasattr(torch.ops.mkldnn, '_linear')", {"torch.ops.mkldnn._linear"}),
        ("self._own", set()),
    ],
)
def test_private_names_are_found(source, expected):
    tree = ast.parse(source)
    imported = [
        (node.module, alias.name) if isinstance(node, ast.ImportFrom) else (alias.name, None)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert set(filter(is_private, names_of_torch(tree, imported))) == expected


def test_private_names_of_torch_are_those_listed():
    assert set().union(*map(private_names_of_torch, modules())) == USED


def test_private_attributes_are_those_listed():
    assert set().union(*map(private_attributes, modules())) == USED_OF_OBJECTS | USED_OF_MODELS | USED_OF_OTHERS
    found = {module for module in modules() if private_attributes(module) & USED_OF_MODELS}
    assert all(module.startswith(f"{NAME}.models.attachment") for module in found), found
    found = {module for module in modules() if private_attributes(module) & USED_OF_OTHERS}
    assert found == {f"{NAME}.models.unpadding"}


def test_private_names_of_torch_stand_in_one_file():
    found = {
        module: names
        for module in modules()
        if (names := private_names_of_torch(module) | (private_attributes(module) - USED_OF_MODELS - USED_OF_OTHERS))
    }
    assert set(found) == {GATHERED}, found
