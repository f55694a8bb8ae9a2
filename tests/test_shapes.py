"""The checks of shapes check something; see tests/shapes.py."""

import ast
import os
import sys

import pytest
import torch

import whereformer
import whereformer.analysis
import whereformer.models
from whereformer import build_position, position_names
from whereformer.positions import method_class
from whereformer.positions.base import PositionMethod, Site

from . import shapes
from .source import modules

installed = pytest.mark.skipif(
    os.environ.get("WHEREFORMER_TEST_SHAPES") != "1", reason="shapes are checked where WHEREFORMER_TEST_SHAPES=1"
)


@installed
def test_functions_are_checked_wherever_they_are_known():
    assert whereformer.attention.shapes_are_checked
    assert whereformer.kernels.attention_varlen.shapes_are_checked
    assert whereformer.analysis.toeplitzness.shapes_are_checked
    assert whereformer.Encoder.forward.shapes_are_checked


@installed
@pytest.mark.parametrize("name", position_names())
def test_hooks_of_every_method_are_checked(name):
    for hook in shapes.HOOKS:
        assert getattr(method_class(name), hook).shapes_are_checked


def test_functions_with_shapes_are_found():
    names = {f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _, _ in shapes.functions_with_shapes()}
    assert {f"{PositionMethod.__name__}.{hook}" for hook in shapes.HOOKS} <= names
    assert {"whereformer.kernels.attention", "Pooling.pool_hidden"} <= names


def test_shapes_need_jaxtyping_in_tests_alone():
    """No module imports it but where type checkers read, so it is never imported with the package."""
    read = 0
    for tree in modules().values():
        blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        unseen = {id(node) for block in blocks for node in block.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and "jaxtyping" in ast.unparse(node):
                assert id(node) in unseen
                read += 1
    assert read


def test_a_hook_that_returns_another_shape_is_found():
    class Wrong(PositionMethod):
        def transform_qkv(self, query, key, value, site):
            return query.mT, key, value

    position, query = build_position(Wrong, hidden_size=8, num_heads=2), torch.zeros(1, 2, 3, 4)
    known = shapes.shapes_of(PositionMethod.transform_qkv, vars(sys.modules[PositionMethod.__module__]))
    positions = whereformer.Positions(0, 1, 3)
    with pytest.raises(AssertionError, match="return: expected"):
        shapes.checked(Wrong.transform_qkv, known)(position, query, query, query, Site(positions, positions))
