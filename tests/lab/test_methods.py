"""Names of position methods in a setting: errors name this setting."""

import pytest

from whereformer.errors import InputError
from whereformer.lab.methods import check_methods, resolve_methods


@pytest.mark.parametrize("field", ["positions", "methods"])
def test_errors_name_the_setting(field):
    setting = [] if field == "positions" else [field]
    with pytest.raises(InputError, match=rf"^{field}: unknown position method 'tsia'; did you mean 'tisa'"):
        resolve_methods(["tsia"], *setting)
    with pytest.raises(InputError, match=rf"^{field}: 'rope' does not fit: .* an even number .* got 3 "):
        check_methods(["tisa", "rope"], *setting, hidden_size=6, num_heads=2)
