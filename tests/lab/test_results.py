"""Results are dataclasses that come back from their file as they were."""

import json
from dataclasses import dataclass, field

import pytest

from whereformer.errors import InputError
from whereformer.lab.json_files import from_json
from whereformer.lab.store import Results


@dataclass(frozen=True)
class Part:
    share: float
    layers: tuple[float | None, ...]
    note: str = ""


@dataclass(frozen=True)
class Whole(Results):
    FORMAT = "whole 2"

    settings: dict[str, int]
    by_seed: dict[int, Part]
    pair: tuple[int, str]
    curves: list[list[float]] | None = None
    extra: dict[str, Part] = field(default_factory=dict)
    last: Part | None = None


WHOLE = Whole({"steps": 3}, {0: Part(0.5, (1.0, None)), 7: Part(1, (), "odd")}, (3, "x"), None)


def test_a_file_gives_back_what_was_saved(tmp_path):
    WHOLE.write(tmp_path / "results.json")
    assert Whole.load(tmp_path / "results.json") == WHOLE
    content = json.loads((tmp_path / "results.json").read_text())
    assert list(content) == ["format", "date", "machine", "versions", "settings", "by_seed", "pair", "extra", "sha256"]
    assert content["by_seed"] == {
        "0": {"share": 0.5, "layers": [1.0, None], "note": ""},
        "7": {"share": 1, "layers": [], "note": "odd"},
    }


def test_numbers_that_are_not_finite_are_refused_and_the_old_file_stays(tmp_path):
    path = tmp_path / "results.json"
    WHOLE.write(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        Whole({}, {0: Part(float("nan"), ())}, (3, "x"), None).write(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    ["", "half a", "[]", '{"format": "whole 1"}', '{"format": "whole 2"}', '{"settings": {}}'],
)
def test_other_files_are_refused_in_a_line_that_names_them(content, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"results\.json is not a complete result of this command"):
        Whole.load(path)


def test_no_file_is_no_results(tmp_path):
    assert Whole.earlier(tmp_path) is None


def test_a_change_is_noticed(tmp_path):
    path = tmp_path / "results.json"
    WHOLE.write(path)
    path.write_text(path.read_text().replace("0.5", "0.6"))
    with pytest.raises(InputError, match=r"results\.json is not a complete .* \(it is not as it was written\)"):
        Whole.load(path)


def test_entries_of_an_older_version_are_dropped():
    content = {"settings": {}, "by_seed": {}, "pair": [1, "x"], "curves": None, "gone": 1}
    assert from_json(Whole, content) == Whole({}, {}, (1, "x"), None)
