"""Sealed files that somebody has changed are refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.damage import damages
from whereformer.lab.json_files import read_json, read_sealed, write_sealed

CONTENT = {
    "facts": {"seed": 0, "name": "a"},
    "files": {"model.safetensors": {"size": 3, "sha256": "abc"}},
    "x": [1, 2.5],
}


@settings(max_examples=60)
@given(data=st.data())
def test_damaged_files_are_refused(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("damaged") / "manifest.json"
    write_sealed(file, CONTENT)
    written = json.loads(file.read_text())
    assert read_sealed(file) == CONTENT
    file.write_text(json.dumps(data.draw(damages(written).filter(lambda content: content != written))))
    with pytest.raises(ValueError, match=r"."):
        read_sealed(file)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' + "1" * 5000 + "}", "[1]", "", "\0"])
def test_json_that_no_command_writes_is_a_value_error(tmp_path, content):
    file = tmp_path / "results.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"."):
        read_json(file)
