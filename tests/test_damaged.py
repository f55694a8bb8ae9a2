"""Manifests that somebody has changed are refused."""

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from whereformer import manifest


@dataclass
class Fields:
    number: float
    rows: Annotated[list[Any], list[tuple[int, float] | str]]
    by_name: dict[str, list[int]]
    anything: Any = None
    optional: bool | None = None


GOOD = {"number": 1, "rows": [[1, 0.5], "x"], "by_name": {"a": [1]}}


@pytest.mark.parametrize(
    ("change", "fitting"),
    [
        *(
            ({name: value}, True)
            for name, value in [("number", -1.5), ("rows", []), ("anything", [{}]), ("optional", True)]
        ),
        *(({"number": value}, False) for value in (None, True, "1", math.nan, math.inf, 10**400, [])),
        *(({"rows": value}, False) for value in ([1], [[1]], [[1, 2, 3]], [[0.5, 1]], [None], "x", {})),
        *(({"by_name": value}, False) for value in ([], {"a": 1}, {"a": ["x"]}, None)),
        ({"optional": 0}, False),
        ({"more": 1}, False),
    ],
)
def test_json_is_compared_with_types(change, fitting):
    assert manifest.matches_type(Fields, {**GOOD, **change}) == fitting


@pytest.mark.parametrize("name", ["number", "rows", "by_name"])
def test_fields_without_a_default_are_needed(name):
    assert not manifest.matches_type(Fields, {key: value for key, value in GOOD.items() if key != name})


FACTS = {"seed": 0, "name": "a", "x": [1, 2.5]}


def readable(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


@pytest.mark.parametrize("part", ["facts", "files"])
def test_forged_manifests_are_refused(part, tmp_path):
    manifest.write(tmp_path, FACTS)
    file = tmp_path / manifest.NAME
    content = json.loads(file.read_text()) | {part: [1]}
    content.pop(manifest.HASH_KEY)
    file.write_text(manifest.dump_with_hash(content))
    assert manifest.find_problem(tmp_path, FACTS) == "its manifest.json cannot be read"


@settings(max_examples=60)
@given(data=st.data())
def test_damaged_manifests_are_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "model.safetensors").write_text("abc")
    manifest.write(folder, FACTS)
    assert manifest.read(folder) == FACTS
    assert manifest.find_problem(folder, FACTS) is None
    file = folder / manifest.NAME
    written = file.read_text()
    index = data.draw(st.integers(0, len(written) - 1))
    changed = written[:index] + data.draw(st.sampled_from(["", "0", "x", '"', "{", "null"])) + written[index + 1 :]
    assume(readable(changed) != json.loads(written))
    file.write_text(changed)
    assert manifest.find_problem(folder, FACTS) == "its manifest.json cannot be read"


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' + "1" * 5000 + "}", "[1]", "", "\0"])
def test_json_that_no_command_writes_is_a_value_error(tmp_path, content):
    (tmp_path / manifest.NAME).write_text(content)
    with pytest.raises(ValueError, match=r"."):
        manifest.read(tmp_path)
