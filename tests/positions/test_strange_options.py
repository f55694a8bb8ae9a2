"""Sizes and options of any kind: a position method is built, or an InputError of one line names the field."""

import numpy as np
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
    known = describe(name)[1].keys() | {"layout"}  # which may not fit the sizes
    options = {option: value}
    builds(lambda: build_position(name, **SIZES, **options), *known)
    config = {"hidden_size": 16, "num_attention_heads": 2, "blocks": "1", "position": name}
    builds(lambda: Encoder(EncoderConfig(**config, position_options=options)), "position_options", *known)


def test_numbers_may_be_numpys():
    actual = build_position("tisa", hidden_size=np.int64(16), num_heads=np.int32(2), num_kernels=np.uint8(3))
    assert actual.amplitude.shape == (1, 2, 3)
    assert build_position("rope", **SIZES, base=np.float32(100)).bases == (100,)
