"""Files of results that somebody has changed: they are read and shown, or refused in one line; never a traceback."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.damage import damages
from tests.lab.report import test_compare_report, test_finetune_report, test_probe_report
from whereformer.errors import InputError
from whereformer.lab.json_files import read_json
from whereformer.lab.terminal import Terminal
from whereformer.lab.training.folder import Folder
from whereformer.lab.training.text import TextFacts
from whereformer.studies.compare.results import CompareResults
from whereformer.studies.finetune.results import FinetuneResults
from whereformer.studies.pretrain.results import PretrainResults
from whereformer.studies.probe.results import ProbeResults

CONSOLE = Terminal(width=100, file=io.StringIO())


def saved(results, tmp_path_factory):
    file = tmp_path_factory.mktemp("results") / "results.json"
    results.write(file)
    return json.loads(file.read_text())


def show_comparison(results):
    CONSOLE.print(results)


def show(results):
    CONSOLE.print(results)
    for key in ("cpu", "threads", "torch"):
        results.machine.setdefault(key, "")
    results.report()
    results.more_files()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return {
        CompareResults: (test_compare_report.results_of(2), show_comparison),
        FinetuneResults: (saved(test_finetune_report.two_tasks(), tmp_path_factory), show),
        ProbeResults: (saved(test_probe_report.made_up(), tmp_path_factory), show),
    }


@settings(max_examples=60)
@given(data=st.data())
def test_damaged_results_are_shown_or_refused(files, tmp_path_factory, data):
    kind = data.draw(st.sampled_from(list(files)))
    content, show = files[kind]
    file = tmp_path_factory.mktemp("damaged") / "results.json"
    file.write_text(json.dumps(data.draw(damages(content))))
    try:
        show(kind.load(file))
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017  # it need not fail


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"a": ' + "1" * 5000 + "}",
        '{"a": 10000000000000000000}',
        '{"a": 1e400}',
        '{"a": NaN}',
        "[1]",
        "",
    ],
)
def test_json_that_no_command_writes_is_a_value_error(tmp_path, content):
    file = tmp_path / "results.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"."):
        read_json(file)
    with pytest.raises(InputError, match=r"^out: .*results\.json is not a complete result"):
        Folder(tmp_path, {}, PretrainResults)


STARTED = {
    "format": 1,
    "parameters": 9,
    "embedding_parameters": 4,
    "positional_parameters": 1,
    "block_lengths": [8],
    "tokens_per_step": 8,
    "steps_per_epoch": 1.0,
    "epochs": 1.0,
    "settings": {"steps": 3, "data": ["x"]},
    "text": vars(TextFacts("x", 1, 2, 3, 4, 5, 1.0)),
}


@settings(max_examples=40)
@given(content=damages(STARTED))
def test_a_folder_of_other_or_damaged_results_is_refused(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("run")
    (folder / "results.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"^out: "):
        Folder(folder, {"steps": 3, "data": ["y"]}, PretrainResults)
