"""The public surface: what can be imported, and what an import costs."""

import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import whereformer

HEAVY = {
    "accelerate",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "pyarrow",
    "rich",
    "safetensors",
    "tokenizers",
    "transformers",
}


def in_a_fresh_process(code):
    """What ``code`` prints in a Python that has imported nothing yet."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def lazy_names():
    return set(whereformer.__all__) - set(vars(whereformer))


def test_every_listed_name_exists():
    if lazy_names():
        pytest.importorskip("transformers")
    for name in whereformer.__all__:
        assert getattr(whereformer, name) is not None


def test_every_public_object_is_listed():
    ours = {
        name
        for name, value in vars(whereformer).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", "").startswith("whereformer")
    }
    assert ours - lazy_names() <= set(whereformer.__all__)


def test_listed_names_are_sorted_and_what_dir_shows():
    assert list(whereformer.__all__) == sorted(set(whereformer.__all__))
    assert dir(whereformer) == whereformer.__all__


def test_the_attention_package_lists_what_it_has():
    from whereformer.kernels.terms import Positions

    package = sys.modules["whereformer.kernels"]
    assert package.Positions is Positions
    for module in (package, whereformer.positions):
        assert all(hasattr(module, name) for name in module.__all__)
        assert module.__all__ == sorted(module.__all__)


@pytest.mark.parametrize("name", ["nonsense", "Encoders", "__wrapped__"])
def test_unknown_names_raise_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module 'whereformer' has no attribute '{name}'"):
        getattr(whereformer, name)


def test_importing_needs_nothing_and_attention_torch_alone():
    """Not even Triton, which torch brings on most systems."""
    code = """
import sys, whereformer
print(*sys.modules)
sys.modules["triton"] = None
whereformer.attention
print(*sys.modules)
for name in whereformer.position_names():
    whereformer.build_position(name, hidden_size=8, num_heads=2)
import torch
inputs = torch.randn(3, 1, 2, 5, 4, requires_grad=True)
whereformer.attention(*inputs).sum().backward()
print(*sys.modules)
try:
    whereformer.attention(*inputs, backend="triton")
except ValueError as error:
    print(error)
"""
    *lines, refusal = in_a_fresh_process(code).splitlines()
    assert "needs Triton, which is not installed" in refusal
    at_import, with_attention, with_all_methods = (set(line.split()) for line in lines)
    # So that the command line can look after Ctrl-C before the long imports.
    assert not {"torch", "whereformer.kernels", "whereformer.positions"} & at_import
    assert {"torch", "whereformer.kernels"} <= with_attention
    assert not HEAVY & with_all_methods
    methods = {f"whereformer.positions.{module}" for module in ("t5", "tisa", "floater", "rope")}
    assert not methods & with_attention  # imported when they are asked for
    assert methods <= with_all_methods


def test_signature_of_attention():
    """Names that users rely on; new ones may join as keywords."""
    parameters = inspect.signature(whereformer.attention).parameters
    positional = [name for name, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    assert positional == ["query", "key", "value", "terms"]
    keywords = {name: parameter.default for name, parameter in parameters.items() if name not in positional}
    fixed = {
        "key_mask": None,
        "causal": False,
        "scale": None,
        "dropout_p": 0.0,
        "query_positions": None,
        "key_positions": None,
        "backend": "auto",
    }
    assert keywords.items() >= fixed.items()


def test_fixed_names_of_methods():
    names = {"none", "sinusoidal", "learned", "shaw", "t5", "floater", "synthesizer", "tupe", "rope", "tisa"}
    assert {*names, "alibi", "fire"} <= set(whereformer.position_names())
