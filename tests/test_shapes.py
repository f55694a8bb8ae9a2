"""The checks of shapes check something; see tests/shapes.py."""

import inspect
import os
from importlib import import_module

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

import whereformer
import whereformer.analysis
import whereformer.models
from whereformer import OffsetKeys, build_position, position_names
from whereformer.positions.base import Place

from . import shapes

installed = pytest.mark.skipif(
    os.environ.get("WHEREFORMER_TEST_SHAPES") != "1", reason="shapes are checked where WHEREFORMER_TEST_SHAPES=1"
)


@installed
def test_functions_are_checked_wherever_they_are_known():
    for name in shapes.FUNCTIONS:
        module, _, path = name.partition(":")
        function = import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
        assert function.shapes_are_checked, name
    assert whereformer.attention.shapes_are_checked
    assert whereformer.analysis.toeplitzness.shapes_are_checked


@installed
@pytest.mark.parametrize("name", position_names())
def test_hooks_of_every_method_are_checked(name):
    position = build_position(name, hidden_size=8, num_heads=2)
    for hook in shapes.HOOKS:
        assert getattr(type(position), hook).shapes_are_checked


def test_what_is_checked_are_parameters_that_functions_have():
    for hook, check in shapes.HOOKS.items():
        known = inspect.signature(getattr(whereformer.positions.base.Position, hook)).parameters
        assert set(inspect.signature(check).parameters) - {"result"} <= set(known)


def test_a_result_of_another_shape_is_found():
    @jaxtyped(typechecker=beartype)
    def check(given: Float[Tensor, "batch n"], result: Float[Tensor, "n batch"]) -> None:
        pass

    def transposed(given, wrong=False):
        return given if wrong else given.mT

    function = shapes.checked(transposed, check)
    assert function(torch.zeros(2, 3)).shape == (3, 2)
    with pytest.raises(TypeCheckError):
        function(torch.zeros(2, 3), wrong=True)


def test_a_term_of_another_shape_is_found():
    position = build_position("shaw", hidden_size=8, num_heads=2)
    hidden, place = torch.zeros(1, 3, 8), Place(whereformer.Positions(0, 1, 3), whereformer.Positions(0, 1, 3))
    narrow = shapes.checked(lambda self, hidden, place: (OffsetKeys(torch.zeros(1, 5, 3), -2),), shapes.HOOKS["terms"])
    assert position.terms(hidden, place)
    with pytest.raises(AssertionError, match="expected"):
        narrow(position, hidden, place)
