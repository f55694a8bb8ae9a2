"""The tables, the sentences and the page of fine-tuning, from numbers that are made up here."""

from tests.lab.report.pages import Page
from whereformer.data.glue import Data, Task
from whereformer.data.labeled import Rows
from whereformer.recipes.finetune import Finetune, FinetuneResult, Prepared, build_variants

MINUS, TO = "\N{MINUS SIGN}", "\N{EN DASH}"
ODD = 'mine<b>&"own"'
BASE, GAINING = "learned", "learned+tisa, S=3"


class Words:
    """A tokenizer."""

    def decode(self, ids, **_):
        return f"row of {len(ids)}"


def test_inputs_whose_answer_changes_are_shown():
    report = report_of(TWO, answers={BASE: [0, 1, 0], GAINING: [0, 0, 1]})
    (sheet,) = [section for section in report.sections if section.title == "Inputs of rte whose answer changes"]
    rows = [[cell.text for cell in row] for row in sheet.rows]
    assert rows == [["row of 1", "a", GAINING, f"{BASE}: b"], ["row of 1", "a", BASE, f"{GAINING}: b"]]
    assert sheet.title not in str(report)
    assert sheet.title in report.page()


def task_of(name, cut=0):
    train, validation = (Rows([([1], [])] * 1000, False, [0] * 1000, number, 0) for number in (cut, 0))
    return Data(Task(name, ("text",), ("a", "b"), ("accuracy",)), {"train": train, "validation": validation}, "here")


def report_of(scores, *, seeds=3, answers=None, **options):
    """Scores are task -> variant -> one a seed."""
    recipe = Finetune(model="some/model", task="rte", seeds=seeds, max_length=64, **{"kernels": (0, 3), **options})
    tasks = {"rte": task_of("rte", 7), ODD: task_of(ODD)}
    prepared = Prepared({task: tasks[task] for task in scores}, {}, dict.fromkeys(recipe.variants, (9, 5, 1)), Words())
    vars(recipe)["prepared"] = prepared
    tuned = {
        (task, name, seed): FinetuneResult({"": {"accuracy": score}}, [], (answers or {}).get(name, []))
        for task, by_name in scores.items()
        for name, by_seed in by_name.items()
        for seed, score in enumerate(by_seed)
    }
    return recipe.report(tuned, range(seeds))


TWO = {"rte": {BASE: [0.6, 0.7, 0.5], GAINING: [0.65, 0.7, 0.7]}, ODD: {BASE: [0.5] * 3, GAINING: [0.4] * 3}}


def test_tables_and_sentences():
    report = report_of(TWO)
    lines = report.markdown().splitlines()
    assert "| task | metric | baseline | S = 3 | gain | error reduction |" in lines
    assert f"| rte | accuracy | 60.0 (50.0{TO}70.0) | 70.0 (65.0{TO}70.0) | +10.0 | +25.0% |" in lines
    assert f"| {ODD} | accuracy | 50.0 | 40.0 | {MINUS}10.0 | {MINUS}20.0% |" in lines
    assert "rte: 7 rows were truncated to 64 tokens" in lines
    verdict = "Keep the baseline: learned+tisa gained 10.0 points on the task rte (accuracy), but not with every seed."
    assert f"**{verdict}**" in lines
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    assert verdict in " ".join(text.split())
    assert "Error reduction is that gain divided by" in " ".join(text.split())


def test_the_page():
    page = report_of(TWO).page()
    assert f'<td data-order="70.0" style="font-weight: bold">70.0<small>65.0{TO}70.0</small></td>' in page
    assert "mine<b>" not in page
    assert "9 parameters, 5 of them positional, 1 of them new" in page
    Page(page).check_self_contained()
    Page(page).check_references()


def test_a_gain_of_every_seed_is_marked():
    report = report_of({"rte": {BASE: [0.6, 0.7, 0.5], GAINING: [0.71, 0.75, 0.8]}})
    assert f"| 75.0 (71.0{TO}80.0) | +15.0* | +37.5% |" in report.markdown()
    assert report.sentences[0] == (
        "Take learned+tisa: with every seed, it is better than the baseline, by 15.0 points on the task rte (accuracy)."
    )


def test_without_a_gain_or_a_baseline():
    assert report_of({"rte": {BASE: [0.6], GAINING: [0.1]}}, seeds=1).sentences[0].startswith("Keep the baseline")
    report = report_of({"rte": {GAINING: [0.1]}}, seeds=1, kernels=3)
    assert "no method has a baseline" in report.sentences[0]
    assert "baseline |" not in report.markdown()


def test_several_methods_are_ranked_in_one_table():
    scores = {
        task: {"learned": [a, a], "rope": [b, b], "none": [c, c]}
        for task, a, b, c in (("rte", 0.5, 0.9, 0.3), (ODD, 0.6, 0.4, 0.3))
    }
    options = {"seeds": 2, "position": "learned,rope", "kernels": 0}
    sheet = report_of(scores, **options).sheets[-1]
    assert sheet.title == "All models, the best first"
    rows = [[cell.text for cell in row] for row in sheet.rows]
    assert rows == [
        ["rope", "90.0", "40.0", "65.0"],
        ["learned", "50.0", "60.0", "55.0"],
        ["none", "30.0", "30.0", "30.0"],
    ]


def test_settings_share_their_models():
    names = [
        [variant.name for variant in build_variants(position, [0, 5])]
        for position in ("learned+tisa", "tisa", "t5+tisa", "learned+t5", "rope", "own")
    ]
    assert names == [
        ["learned", "learned+tisa, S=5"],
        ["none", "tisa, S=5"],
        ["t5", "t5+tisa, S=5"],
        ["learned", "learned+t5"],
        ["none", "rope"],
        ["own"],
    ]
    assert build_variants("tisa", [0, 5])[1].kernels == 5
    assert build_variants("own", [0])[0].position is None
