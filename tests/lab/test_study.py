"""The shape of studies, by the one that the docs show."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from whereformer.errors import InputError
from whereformer.lab.folder import open_folder
from whereformer.lab.study import command_line, function

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def toy():
    """The study of the docs, as the module that it would be."""
    text = (DOCS / "architecture" / "lab.md").read_text(encoding="utf-8")
    code, use = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    module = ModuleType("toy_study")
    sys.modules["toy_study"] = module
    exec(compile(code, "lab.md", "exec"), module.__dict__)
    module.use = use
    yield module
    del sys.modules["toy_study"]


def test_the_study_of_the_docs_runs_and_prints(toy, capsys):
    exec(toy.use, dict(toy.__dict__))
    out = capsys.readouterr().out
    assert re.search(r"learned +32,768", out)
    assert "tisa has the fewest parameters." in out


def test_a_study_continues_what_its_folder_has(toy, tmp_path, monkeypatch):
    count = function(toy.Count, "count")
    first = count(positions="learned", out=tmp_path, quiet=True)
    monkeypatch.setattr(toy.CountJob, "count", lambda self, key, progress: 7)
    both = count(positions="learned,tisa", out=str(tmp_path), quiet=True)
    assert both.runs == {**first.runs, "tisa": 7}
    assert toy.CountResults.load(tmp_path).runs == both.runs
    assert json.loads((tmp_path / "results.json").read_text())["format"] == "count 1"


def test_a_page_without_its_own_template_has_sentences_sheets_and_settings(toy, tmp_path):
    results = function(toy.Count, "count")(out=tmp_path, quiet=True)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for text in (*results.sentences(), '<h2 id="table-1">Parameters of position</h2>', "32,768", "hidden size"):
        assert text in page
    assert results.date
    assert results.machine["torch"]


def test_other_settings_and_a_locked_folder_are_refused(toy, tmp_path):
    count = function(toy.Count, "count")
    count(positions="learned", out=tmp_path, quiet=True)
    with pytest.raises(InputError, match="hidden_size 64, not 32"):
        count(hidden_size=32, out=tmp_path, quiet=True)
    with open_folder(tmp_path), pytest.raises(InputError, match="another command is writing"):
        count(out=tmp_path, quiet=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"hidden": 3}, "hidden: count has no such option; did you mean 'hidden_size'?"),
        ({"xyz": 3}, "xyz: count has no such option; expected some of"),
        ({"hidden_size": 3.5}, "hidden_size: expected int, got 3.5"),
        ({"hidden_size": True}, "hidden_size: expected int, got True"),
        ({"hidden_size": 3}, "hidden_size: expected 4 to 4096, got 3"),
        ({"positions": "tisa,foo"}, "positions: unknown"),
        ({"positions": 3}, "positions: expected str, got 3"),
    ],
)
def test_a_bad_argument_is_named(toy, given, expected):
    with pytest.raises(InputError) as error:
        function(toy.Count, "count")(**given, quiet=True)
    assert expected in str(error.value)


def test_the_command_line_has_what_is_not_the_default(toy):
    options = toy.Count(positions="a b", hidden_size=64, out=Path("c"))
    assert command_line(options, "count") == "whereformer count --positions 'a b' --out c"
