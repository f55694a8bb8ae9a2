"""Names of position methods in a setting: errors name this setting."""

import pytest

from whereformer.errors import InputError
from whereformer.lab.methods import check_methods, known_methods


def test_errors_name_the_setting():
    with pytest.raises(InputError, match=r"^methods: unknown position method 'tsia'; did you mean 'tisa'"):
        known_methods(["tsia"], field="methods")
    with pytest.raises(InputError, match=r"^positions: unknown position method 'tsia'; did you mean 'tisa'"):
        known_methods(["tsia"])
    sizes = {"hidden_size": 6, "num_heads": 2}
    with pytest.raises(InputError, match=r"^methods: 'rope' does not fit: .*expected an even number up to head_dim 3"):
        check_methods(["tisa", "rope"], field="methods", **sizes)
    with pytest.raises(InputError, match=r"^positions: 'rope' does not fit: .*expected an even number up to head_dim 3"):
        check_methods(["tisa", "rope"], **sizes)
