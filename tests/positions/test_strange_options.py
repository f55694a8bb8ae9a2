"""Sizes and options of any kind: a position method is built, or an InputError of one line names the field."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_strange_arguments import STRANGE
from whereformer import Encoder, EncoderConfig
from whereformer.errors import InputError
from whereformer.positions import build_position, describe, position_names

SIZES = {"hidden_size": 16, "num_heads": 2}
MORE = [3, 2**20, 2**20 + 1, 10**5000, -(10**5000), 5e-324, 1e308, False, "12", "a+b", 1j, [1], [[0]], [-1], ["a"], {1}]
MORE += [(1, "a"), range(1), np.ones(2), np.float32(2), np.bool_(True)]
VALUES = st.one_of(st.sampled_from(STRANGE + MORE), st.integers(), st.floats(), st.text(max_size=9))
OPTIONS = [(name, option) for name in position_names() for option in describe(name)[1]]


def builds(make, *fields):
    """Whether something is built. Nothing but an InputError of one line about one of the fields may prevent it."""
    try:
        with torch.device("meta"):
            make()
    except InputError as error:
        assert error.field in fields  # noqa: PT017  # it need not fail
        assert "\n" not in str(error)  # noqa: PT017
        return False
    return True


@settings(max_examples=200)
@given(st.sampled_from(OPTIONS), VALUES)
def test_options_of_any_kind(chosen, value):
    name, option = chosen
    own = describe(name)[1].keys() | {"layout"}  # which may not fit the sizes
    options = {option: value}
    builds(lambda: build_position(name, **SIZES, **options), *own)
    config = {"hidden_size": 16, "num_attention_heads": 2, "blocks": "1", "position": name}
    builds(lambda: Encoder(EncoderConfig(**config, position_options=options)), "position_options", *own)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("synthesizer", {"rank": "zzz"}, "rank: expected an integer, got 'zzz'"),
        ("floater", {"solver": ["rk4"]}, r"solver: expected text, got \['rk4'\]"),
        ("sinusoidal", {"max_timescale": 10**400}, "max_timescale: expected a finite number, got 1000"),
        ("tisa", {"num_kernels": -(10**5000)}, "num_kernels: expected at least -1048576, got a huge int"),
        ("tisa", {"num_layers": 2**31}, "num_layers: expected at most 1048576, got 2147483648"),
        ("tisa", {"causal": 1}, "causal: expected True or False, got 1"),
        ("tisa", {"layer_of_pass": 3}, "layer_of_pass: expected a number for each of 1 layers, got 3"),
        ("tisa", {"layer_of_pass": [-1]}, r"layer_of_pass: expected a number for each of 1 layers, got \[-1\]"),
        ([], {}, r"position: expected the name of a method, got \[\]"),
    ],
)
def test_the_line_says_what_is_expected(name, options, message):
    with pytest.raises(InputError, match=f"^{message}"):
        build_position(name, **SIZES, **options)


def test_numbers_may_be_numpys():
    actual = build_position("tisa", hidden_size=np.int64(16), num_heads=np.int32(2), num_kernels=np.uint8(3))
    assert actual.amplitude.shape == (1, 2, 3)
    assert build_position("rope", **SIZES, base=np.float32(100)).bases == (100,)
