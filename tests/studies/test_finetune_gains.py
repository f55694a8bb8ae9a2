"""The table's arithmetic, on numbers of the TISA paper."""

import pytest

from whereformer.studies.finetune.gains import gain_over, tables
from whereformer.studies.finetune.results import (
    FinetuneResults,
    FinetuneSettings,
    Shown,
    TaskFacts,
    TunedModel,
)
from whereformer.studies.finetune.variants import settings_of


def test_relative_error_reduction_as_in_the_paper():
    # Table 3, with position embeddings: MNLI 83.8, and 84.1, 84.4, 84.8 with 1, 3 and 5 kernels.
    gain, reduction = gain_over(83.8, [84.1, 84.4, 84.8])
    assert gain == pytest.approx(1.0)
    assert reduction == pytest.approx(5.9, abs=0.3)  # the paper's is of scores that are not rounded
    assert gain_over(50.0, [45.0, 40.0]) == (-5.0, -10.0)
    assert gain_over(100.0, [90.0]) == (-10.0, None)


def facts_of(**changes):
    facts = {"source": "somewhere", "rows": {"train": 9}, "subsets": [], "fingerprint": "0", "judged": [""]}
    facts |= {"metrics": ["accuracy"], "classes": None, "tokens_of_a_row": {}, "cut_rows": 0}
    return TaskFacts(**{**facts, **changes})


def runs_of(*scores):
    """One run a seed."""
    return {seed: TunedModel({"": {"accuracy": score}}, 1.0, 1.0, []) for seed, score in enumerate(scores)}


def results_of(scores, **shown):
    """One task; ``scores`` are variant -> one a seed."""
    return FinetuneResults(
        settings=FinetuneSettings(batch_size=8, max_length=64, weights="0", device="cpu", tokenizer="0"),
        tasks={"rte": facts_of()},
        runs={"rte": {name: runs_of(*by_seed) for name, by_seed in scores.items()}},
        curves={},
        model="some/model",
        parameters={},
        machine={"cpu": "a CPU", "threads": 1},
        versions={"torch": "2.13"},
        shown=Shown(**{"positions": ["learned+tisa"], "kernels": [0, 1, 3], "seeds": [0, 1, 2], **shown}),
    )


def test_medians_ranges_and_gains():
    scores = {
        "learned": [0.6, 0.7, 0.5],
        "learned+tisa, S=1": [0.6, 0.5, 0.55],
        "learned+tisa, S=3": [0.6, 0.62, 0.7],
    }
    (table,) = tables(results_of(scores))
    assert table.position == "learned+tisa"
    assert table.columns == ["baseline", "S = 1", "S = 3"]
    (row,) = table.rows
    assert [(c.median, c.low, c.high) for c in row.cells] == [
        pytest.approx(numbers) for numbers in ((60, 50, 70), (55, 50, 60), (62, 60, 70))
    ]
    assert row.gain == pytest.approx(2)
    assert row.error_reduction == pytest.approx(5)


def test_what_was_not_run_or_not_asked_for_is_left_out():
    scores = {"learned": [0.6, 0.7, 0.0], "learned+tisa, S=3": [0.8]}
    (table,) = tables(results_of(scores, seeds=[0, 1]))
    (row,) = table.rows
    assert [cell and cell.median for cell in row.cells] == [pytest.approx(65), None, pytest.approx(80)]
    assert tables(results_of({}, seeds=[0])) == []
    (table,) = tables(results_of(scores, kernels=[3]))
    assert table.columns == ["S = 3"]
    assert table.rows[0].gain is None


def test_settings_share_their_models():
    settings = settings_of(["learned+tisa", "tisa", "t5+tisa", "learned+t5", "rope", "own"], [0, 5])
    names = [[variant.name for variant in setting.variants] for setting in settings]
    assert names == [
        ["learned", "learned+tisa, S=5"],
        ["none", "tisa, S=5"],
        ["t5", "t5+tisa, S=5"],
        ["learned", "learned+t5"],
        ["none", "rope"],
        ["own"],
    ]
    assert settings[1].variants[1].options == {"num_kernels": 5}
    assert settings[-1].variants[0].position is None


def test_a_gain_is_clear_if_every_seed_is_better():
    def clear(baseline, other):
        (table,) = tables(results_of({"learned": baseline, "learned+tisa, S=3": other}, seeds=[0, 1]))
        return table.rows[0].clear

    assert clear([0.5, 0.6], [0.61, 0.7])
    assert not clear([0.5, 0.6], [0.6, 0.7])
    assert not clear([0.5], [0.7])  # one seed says nothing of its spread
    assert not clear([0.5, 0.6], [0.7])
    assert clear([0.0, 0.0], [0.1, 0.1])  # seeds may agree
    assert not clear([0.5, 0.6], [0.3, 0.4])
