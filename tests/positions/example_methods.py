"""Loads the methods in examples/methods, which a user's plugin would register, without registering them."""

import importlib.util
from pathlib import Path

from whereformer.positions import METHODS

FOLDER = Path(__file__).parents[2] / "examples" / "methods"


def example_method(name):
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert METHODS.pop(name).__module__ == name  # other tests read the registry
    return module
