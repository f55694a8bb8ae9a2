"""Files of results that somebody has changed are refused in one line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.damage import damages
from tests.lab.test_results import WHOLE, Whole
from whereformer.errors import InputError
from whereformer.lab.json_files import read_json
from whereformer.lab.training.folder import Folder
from whereformer.studies.pretrain.results import PretrainResults


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    file = tmp_path_factory.mktemp("results") / "results.json"
    WHOLE.write(file)
    return json.loads(file.read_text())


@settings(max_examples=60)
@given(data=st.data())
def test_damaged_results_are_refused(written, tmp_path_factory, data):
    file = tmp_path_factory.mktemp("damaged") / "results.json"
    content = data.draw(damages(written).filter(lambda content: content != written))
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"^out: .*results\.json is not a complete result of this command"):
        Whole.load(file)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' + "1" * 5000 + "}", "[1]", "", "\0"])
def test_json_that_no_command_writes_is_a_value_error(tmp_path, content):
    file = tmp_path / "results.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"."):
        read_json(file)
    with pytest.raises(InputError, match=r"^out: .*results\.json is not a complete result"):
        Folder(tmp_path, {}, PretrainResults)
