"""Names of position methods in a setting: errors name this setting."""

import pytest

from whereformer.errors import InputError
from whereformer.lab.methods import check_methods, resolve_methods


def test_errors_name_the_setting():
    with pytest.raises(InputError, match=r"^positions: unknown position method 'tsia'; did you mean 'tisa'"):
        resolve_methods(["tsia"])
    message = r"^positions: 'rope' does not fit: .* an even number for pairs of features, got head_dim 3 "
    with pytest.raises(InputError, match=message):
        check_methods(["tisa", "rope"], hidden_size=6, num_heads=2)
