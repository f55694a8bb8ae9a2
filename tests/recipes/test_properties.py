"""Table 1 of the TISA paper, measured on a comparison of a size that takes seconds, and its thresholds."""

import json
import re
import shutil

import pytest

from tests.failing import fails
from tests.recipes.test_compare import run
from whereformer.cli.main import main
from whereformer.lab.recipe import RECIPE
from whereformer.manifest import dump_with_hash
from whereformer.recipes import properties
from whereformer.recipes.comparison_report import ComparisonResult
from whereformer.recipes.properties import PropertyResult

METHODS = "tisa,learned,rope,learned+tisa"


@pytest.fixture(scope="module")
def comparison(text, tmp_path_factory):
    """A finished comparison."""
    folder = tmp_path_factory.mktemp("comparison")
    run(text, folder, positions=f"none,{METHODS}")
    return folder


def measured(capsys, *arguments):
    """What the command prints, and the words of its table by method."""
    capsys.readouterr()
    main(["positions", *map(str, arguments)])
    out = capsys.readouterr().out
    words = {}
    for line in out.splitlines():
        if match := re.match(r" ([a-z+]+) +(?=yes|no |open|no\*)", line):
            words.setdefault(match[1], []).extend(re.findall(r"\b(?:yes|no|open)\b", line[match.end() :]))
    return out, words


def test_it_measures_the_models_of_a_comparison_and_prints_the_table(comparison, capsys):
    out, words = measured(capsys, "--measure", comparison)
    assert max(map(len, out.splitlines())) <= 100
    assert list(words) == METHODS.split(",")
    assert words["tisa"][1:] == ["yes"] * 5
    assert words["learned"] == ["no", "yes", "no", "no", "yes", "no"]
    assert words["rope"][1:5] == ["no", "yes", "yes", "yes"]
    assert "learned, inductive: learned covers positions 0 to 15" in " ".join(out.split())
    for word in ("translation", "n/a", "30/30"):
        assert word in out
    _, subset = measured(capsys, "learned*", "--measure", comparison)
    assert subset == {name: words[name] for name in ("learned", "learned+tisa")}


def changed(comparison, folder, change):
    """A copy of the comparison with other options or records."""
    shutil.copytree(comparison, folder)
    path = folder / "records.jsonl"
    first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = change(first["options"], lines) or lines
    for line in (first, *lines):
        line.pop("check")
    path.write_text("".join(map(dump_with_hash, (first, *lines))))  # as if it had been written like this
    return "positions", "--measure", str(folder)


def test_what_cannot_be_measured_is_named(comparison, text, tmp_path, capsys):
    folder = tmp_path / "changed"
    for change, expected in (
        (lambda options, _: options.update(data=["gone.txt"]), "read again (no such file or folder: 'gone.txt')"),
        (lambda options, _: options.update(characters=5000), "has changed; run whereformer compare again"),
        (lambda options, _: options.update(blocks="1-1"), "--measure: expected masked language models of one block"),
        (
            lambda _, lines: [line for line in lines if '"train"' not in line["key"] or '"none"' in line["key"]],
            "matches; it has none",
        ),
        (lambda options, _: options.update({RECIPE: "probe"}), "has no results of whereformer compare"),
    ):
        assert expected in fails(capsys, *changed(comparison, folder, change))
        shutil.rmtree(folder)
    assert "has no results of whereformer compare" in fails(capsys, "positions", "--measure", str(tmp_path))
    command = changed(comparison, folder, lambda *_: None)
    model = folder / "models" / "rope-0" / "model.safetensors"
    model.rename(model.with_suffix(".bin"))
    message = fails(capsys, *command)
    assert "has no trained model of 'rope' (" in message
    assert "run the same whereformer compare again" in message
    # What the line says helps.
    run(text, folder, positions=f"none,{METHODS}")
    assert set(measured(capsys, *command[1:], "rope")[1]) == {"rope"}


def runs_of(*losses, cannot=""):
    """A model for each pair of losses, at the training length and at four times that."""
    return {
        seed: ComparisonResult(1, [], [[short, 0.1], cannot or [long, 0.1]], [], 0, None)
        for seed, (short, long) in enumerate(losses)
    }


BASELINE = runs_of((5.0, 5.1))


@pytest.mark.parametrize(
    ("tick", "holds", "number"),
    [
        (properties.inductive(runs_of((3.0, 3.05)), BASELINE, 1), True, "+0.05"),
        (properties.inductive(runs_of((3.0, 3.12)), BASELINE, 1), False, "+0.12"),
        (properties.inductive(runs_of((3.0, 3.5), (3.0, 3.0), (3.0, 3.02)), BASELINE, 1), True, "+0.02"),
        (properties.inductive(runs_of((4.95, 4.97)), BASELINE, 1), None, "+0.02"),
        (properties.inductive(runs_of((4.95, 5.2)), BASELINE, 1), False, "+0.25"),
        (properties.inductive(runs_of((4.95, 4.97)), {}, 1), True, "+0.02"),
        (properties.inductive(runs_of((3.0, 0.0), cannot="0 to 15"), BASELINE, 1), False, "n/a"),
        (properties.data_driven(10, 100), True, "10/100"),
        (properties.data_driven(9, 100), False, "9/100"),
        (properties.data_driven(0, 0), False, "0"),
        (properties.parameter_efficient(2160, 0.0), True, "2.2k"),
        (properties.parameter_efficient(300_000, 0.0), False, "300k"),
        (properties.parameter_efficient(2160, 0.5), False, "2.2k n^0.5"),
        (properties.translation_invariant([0.0, 1e-13]), True, "1e-13"),
        (properties.translation_invariant([0.052, 0.0]), False, "0.052"),
        (properties.translation_invariant([0.0, 3e-6]), False, "3e-06"),
        (properties.translation_invariant([0.0, None]), False, "not finite"),
        (properties.parallelizable(12, 12), True, "12, 12"),
        (properties.parallelizable(100, 400), False, "100, 400"),
        (properties.interpretable(1.0), True, "100%"),
        (properties.interpretable(0.89), False, "89%"),
        (properties.interpretable(None), None, "no effect"),
    ],
)
def test_each_threshold_decides_its_tick(tick, holds, number):
    assert (tick.has_property, tick.number) == (holds, number)


def test_ticks_that_are_open_or_cannot_be_say_why():
    assert "0.05 nats better than no positions" in properties.inductive(runs_of((4.95, 4.97)), BASELINE, 1).note
    assert "0.05 nats worse than no positions" in properties.inductive(runs_of((5.05, 5.049)), BASELINE, 1).note
    assert properties.inductive(runs_of((3.0, 0.0), cannot="0 to 15"), BASELINE, 1).note == "0 to 15"
    assert properties.interpretable(None).note == "it does not change scores"


def test_what_the_paper_says_otherwise_is_marked():
    ticks = dict.fromkeys(properties.MEANINGS, PropertyResult(True, "1"))
    sheet = properties.sheet(
        {"shaw": ticks, "learned+tisa": ticks, "t5": ticks | {"interpretable": PropertyResult(None, "0")}}
    )
    words = {row[0].text: [cell.text for cell in row[1:]] for row in sheet.rows}
    assert words["shaw"] == ["yes*", "yes", "yes", "yes", "yes*", "yes*"]
    assert words["learned+tisa"] == ["yes"] * 6
    assert words["t5"] == ["yes*", "yes", "yes", "yes", "yes", "open"]
    assert sheet.notes[-1] == "*: differs from the paper"
    assert all(len(letters) == len(properties.MEANINGS) for letters in properties.PAPER.values())


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0k"), (50_688, "50.7k"), (393_216, "393k"), (37_748_736, "37.7M")],
)
def test_counts_are_short(number, text):
    assert properties.short_count(number) == text
