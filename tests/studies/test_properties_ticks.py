"""Ticks follow from thresholds; what the paper says stands beside them."""

import copy
from dataclasses import replace

import pytest

from whereformer.lab.json_files import from_json
from whereformer.studies.properties import ticks
from whereformer.studies.properties.results import PropertiesResults

LENGTH = 16


def run_of(**changed):
    """Measurements of a method that has every property."""
    run = {
        "seed": 0,
        "reached": {"nonzero": 90, "total": 100},
        "growth": {"count": 2160, "attention": 28_311_552, "length": 0.0, "width": 1.0, "depth": 1.0},
        "shifted_fresh": {"scores": 0.0, "output": 0.0, "shifts": [1]},
        "shifted_trained": {"scores": 1e-13, "output": 0.0, "shifts": [1]},
        "curve": {"share": 1.0, "layers": [1.0]},
        "steps": {
            "lengths": [64, 256],
            "chain": [12, 12],
            "operations": [40, 40],
            "seconds": [2e-4, 9e-4],
            "plain_seconds": [1e-4, 3e-4],
        },
    }
    for name, values in changed.items():
        run[name] = {**run[name], **values}
    return run


def losses_of(short, long, **cannot):
    of_long = cannot or {"loss": long, "accuracy": 0.1}
    return {"0": {str(LENGTH): {"loss": short, "accuracy": 0.1}, str(4 * LENGTH): of_long}}


def data_of(position="tisa", losses=None, **changed):
    return {
        "settings": {
            "blocks": "2",
            "decoder_layers": "0",
            "length": LENGTH,
            "steps": 3,
            "batch_size": 4,
            "hidden_size": 16,
            "num_heads": 2,
            "vocab_size": 64,
            "mask_rate": 0.4,
            "learning_rate": 0.008,
            "rate_factors": [1.0],
            "text": "0",
            "device": "cpu",
        },
        "text": {"source": "<i>news</i>"},
        "machine": {"cpu": "Some CPU", "torch": "2.13.0"},
        "thresholds": {},
        "losses": {"none": losses_of(5.0, 5.1), position: losses or losses_of(3.0, 3.05)},
        "runs": {position: run_of(**changed)},
    }


def judged(data):
    """The results with their table, and its only row."""
    results = from_json(PropertiesResults, data)
    results = replace(results, table=ticks.judge(results, list(results.runs)))
    (row,) = results.table.values()
    return results, row


def row_of(*arguments, **changed):
    return judged(data_of(*arguments, **changed))[1]


def notes_of(row, position="tisa"):
    return [sentence for found in ticks.notes({position: row}).values() for sentence in found]


def test_a_method_with_every_property_agrees_with_the_paper():
    row = row_of()
    assert list(row) == list(ticks.MEANINGS) == list(ticks.TITLES) == list(ticks.THRESHOLDS)
    assert [tick.word for tick in row.values()] == ["yes"] * 6
    assert [tick.number for tick in row.values()] == ["+0.05", "90/100", "2.2k", "1e-13", "12, 12", "100%"]
    assert notes_of(row) == []


@pytest.mark.parametrize(
    ("name", "changed", "number"),
    [
        ("inductive", {"losses": losses_of(3.0, 3.12)}, "+0.12"),
        ("data_driven", {"reached": {"nonzero": 9}}, "9/100"),
        ("data_driven", {"reached": {"nonzero": 0, "total": 0}}, "0"),
        ("parameter_efficient", {"growth": {"count": 300_000}}, "300k"),
        ("parameter_efficient", {"growth": {"length": 0.5}}, "2.2k n^0.5"),
        ("translation_invariant", {"shifted_fresh": {"scores": 0.052}}, "0.052"),
        ("translation_invariant", {"shifted_trained": {"output": 3e-6}}, "3e-06"),
        ("translation_invariant", {"shifted_trained": {"output": None}}, "not finite"),
        ("parallelizable", {"steps": {"chain": [100, 400]}}, "100, 400"),
        ("interpretable", {"curve": {"share": 0.89}}, "89%"),
    ],
)
def test_each_threshold_takes_its_tick_and_no_other(name, changed, number):
    row = row_of(**changed)
    assert {each for each, tick in row.items() if not tick.holds} == {name}
    tick = row[name]
    assert (tick.holds, tick.number, tick.paper, tick.differs) == (False, number, True, True)
    sentence, *_ = notes_of(row)
    assert sentence.startswith(f"tisa, {ticks.TITLES[name]}: no ({number}), but the paper says yes; ")
    assert len(sentence) > 60


def test_what_cannot_be_read_is_no_with_the_reason():
    row = row_of("learned", losses_of(3.0, 0.0, cannot="learned covers positions 0 to 15"))
    tick = row["inductive"]
    assert (tick.holds, tick.number, tick.differs) == (False, "cannot", False)
    assert "learned, inductive: learned covers positions 0 to 15" in notes_of(row, "learned")


def test_a_method_that_gained_nothing_leaves_the_tick_open_unless_it_loses_even_so():
    row = row_of(losses=losses_of(4.95, 4.97))
    assert row["inductive"].word == "open"
    assert not row["inductive"].differs
    assert "0.05 nats better than no positions" in notes_of(row)[0]
    assert row_of(losses=losses_of(4.95, 5.2))["inductive"].word == "no"
    worse = row_of(losses=losses_of(5.05, 5.049))
    assert worse["inductive"].number == "+0.00"
    assert "0.05 nats worse than no positions" in notes_of(worse)[0]


def test_without_the_baseline_the_rise_alone_decides():
    data = data_of(losses=losses_of(4.95, 4.97))
    del data["losses"]["none"]
    assert judged(data)[1]["inductive"].holds


def test_the_median_over_seeds_decides():
    data = data_of()
    rises = (0.5, 0.0, 0.02)
    data["losses"]["tisa"] = {str(seed): losses_of(3.0, 3.0 + rise)["0"] for seed, rise in enumerate(rises)}
    assert judged(data)[1]["inductive"].number == "+0.02"


def test_no_effect_on_scores_is_open():
    row = row_of(curve={"share": None})
    assert row["interpretable"].word == "open"
    assert "does nothing to scores" in notes_of(row)[0]


def test_methods_that_the_paper_does_not_have_disagree_with_nothing():
    row = row_of("learned+tisa", curve={"share": 0.1})
    assert all(tick.paper is None for tick in row.values())
    assert notes_of(row, "learned+tisa") == []


def test_known_reasons_are_for_what_the_paper_says_otherwise():
    """A reason belongs to a method and property of the paper's table."""
    for position, name in ticks.REASONS:
        assert position in ticks.PAPER
        assert name in ticks.MEANINGS
    assert all(len(letters) == len(ticks.MEANINGS) for letters in ticks.PAPER.values())


def test_shaw_is_parallelizable_against_the_paper_only_if_it_is_measured_so():
    assert row_of("shaw")["parallelizable"].reason == ticks.REASONS["shaw", "parallelizable"]
    slow = row_of("shaw", steps={"chain": [10, 1000]})
    assert slow["parallelizable"].reason == ""


def test_judging_changes_nothing():
    results = from_json(PropertiesResults, data_of())
    before = copy.deepcopy(results)
    ticks.judge(results, ["tisa"])
    assert results == before


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0k"), (50_688, "50.7k"), (393_216, "393k"), (37_748_736, "37.7M")],
)
def test_counts_are_short(number, text):
    assert ticks.short_count(number) == text
