"""Labeled text: GLUE by name, from a folder or the Hub, and tables of one's own."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.recipes.finetuning import columns, save_glue
from whereformer.data import glue
from whereformer.errors import InputError
from whereformer.recipes.finetune import Finetune


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_glue(tmp_path_factory.mktemp("glue"), *glue.GLUE, subsets=("validation_mismatched",))


def load(**options):
    """Load what the options of a fine-tuning name."""
    recipe = Finetune(model="none", **options)
    if recipe.train is None:
        return glue.load_glue(recipe.task, recipe.data, recipe.train_rows)
    arguments = recipe.train, recipe.validation, recipe.text, recipe.label
    return [glue.load_own(*arguments, regression=recipe.regression, train_rows=recipe.train_rows)]


def fails(match, **settings):
    with pytest.raises(InputError, match=match):
        load(**settings)


def test_every_task_has_its_columns_and_metrics(folder):
    tasks = {data.task.name: data for data in load(task="all", data=folder)}
    assert list(tasks) == ["sst2", "mnli", "qqp", "stsb", "cola", "mrpc", "qnli", "rte", "wnli"]
    assert tasks["cola"].task.metrics == ("matthews",)
    assert tasks["mrpc"].task.metrics == tasks["qqp"].task.metrics == ("f1", "accuracy")
    assert tasks["stsb"].task.metrics == ("pearson", "spearman")
    assert list(tasks["mnli"].eval_splits) == ["matched", "mismatched"]
    assert tasks["mnli"].counts == {"train": 24, "validation_matched": 24, "validation_mismatched": 24}
    expected = columns(glue.GLUE["qnli"], 24)
    assert list(tasks["qnli"].train.texts) == list(zip(expected["question"], expected["sentence"], strict=True))
    assert tasks["qnli"].train.labels == expected["label"]


def test_some_rows_are_the_same_ones_every_time(folder):
    all_rows, part, again = (load(task="cola", data=folder, train_rows=rows)[0] for rows in (None, 5, 5))
    assert part.train == again.train
    assert len(list(part.train.texts)) == len(part.train.labels) == 5
    assert set(part.train.texts) <= set(all_rows.train.texts)
    assert part.eval_splits == all_rows.eval_splits
    assert load(task="cola", data=folder, train_rows=1000)[0] == all_rows


def test_the_hub(monkeypatch, folder, tmp_path):
    """A folder stands for a data set there: the library opens both the same way."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
    real = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, split: real(str(folder / name), split=split))
    (data,) = load(task="stsb")
    (local,) = load(task="stsb", data=folder)
    assert data == replace(local, source="nyu-mll/glue")

    def unreachable(*arguments, **options):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    fails(r"data: cannot read hub:nyu-mll/glue:cola:train from the Hugging Face Hub \(no network\)", task="cola")


def own_files(tmp_path, train, validation=None):
    files = {}
    for name, labels in (("train", train), ("validation", train if validation is None else validation)):
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps({"t": "the cat", "y": label}) + "\n" for label in labels))
    return {**files, "text": "t", "label": "y"}


def test_own_classes_may_be_numbers_and_own_numbers_whole(tmp_path):
    assert load(**own_files(tmp_path, [10, 9, 10]))[0].task.classes == ("10", "9")
    (data,) = load(**own_files(tmp_path, [1, 2, 3]), regression=True)
    assert data.task.classes is None
    assert data.task.metrics == ("pearson", "spearman")
    assert data.train.labels == [1, 2, 3]


def test_errors_of_own_tables(tmp_path):
    good = own_files(tmp_path, ["a", "b"])
    fails("^train: .*train.jsonl has no column 'x'; name one of t, y", **{**good, "text": "x"})
    fails("train.jsonl has no column 'z'; name one of t, y", **{**good, "label": "z"})
    fails("validation: no such file", **{**good, "validation": tmp_path / "none.csv"})
    fails("train: expected a .csv, .* file, got '.*folder'", **{**good, "train": tmp_path / "folder"})
    fails("label: a task of your own", **{**good, "label": None})
    fails("text: expected one column or two", **{**good, "text": "a,b,c"})
    fails("task: GLUE tasks and a task of your own", **good, task="cola")
    fails(
        r"^validation: .*validation.jsonl, row 2: expected one of 10, 20, got 1",
        **own_files(tmp_path, [10, 20], [10, 1]),
    )
    fails("label: expected at least two classes", **own_files(tmp_path, ["a", "a"]))
    good = own_files(tmp_path, ["a", "b"])
    (tmp_path / "empty.csv").write_text("t,y\n")
    fails("^validation: .*empty.csv: expected at least one row", **{**good, "validation": tmp_path / "empty.csv"})


def test_a_row_without_a_label_has_no_class(tmp_path):
    fails(r"row 3: expected one of None, b, got None", **own_files(tmp_path, ["None", "b", None]))


@pytest.mark.parametrize("label", [1.5e9, -1.5e9, 2**62, float("inf"), float("nan"), True])
def test_a_number_has_to_be_one_that_a_model_can_predict(tmp_path, label):
    labels = [True, False] if label is True else [1, label] if isinstance(label, int) else [0.5, label]
    table = {"t": ["some text"] * 2, "y": labels}
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    files = {"train": tmp_path / "a.parquet", "validation": tmp_path / "a.parquet"}
    row = 1 if label is True else 2
    fails(
        rf"a.parquet, row {row}: expected a number of at most 1e\+09 in 'y', got {re.escape(repr(label))}",
        **files,
        text="t",
        label="y",
        regression=True,
    )


def test_errors_of_glue(tmp_path, folder):
    fails("task: expected a GLUE task", data=folder)
    fails("task: expected one of sst2, mnli, .* all, got 'colla'", task="cola,colla", data=folder)
    fails("data: the folder does not exist", task="cola", data=tmp_path / "none")
    fails(r"data: expected .*cola/train.parquet \(or train_subset.parquet\)", task="cola", data=tmp_path)
    fails("validation: only with `train`", task="cola", data=folder, validation=Path("x.csv"))
    fails("regression: only with `train`", task="cola", data=folder, regression=True)
    fails("train_rows: expected at least 1, got 0", task="cola", data=folder, train_rows=0)
    broken = save_glue(tmp_path, "rte")
    table = columns(glue.GLUE["rte"], 3)
    for changed, message in (
        ({"label": [0, -1, 1]}, r"row 2: expected one of 0, 1, got -1"),
        ({"sentence2": ["a", None, "b"]}, "row 2: expected text in sentence1 and sentence2, got"),
    ):
        parquet.write_table(pa.table({**table, **changed}), broken / "rte" / "validation.parquet")
        fails(message, task="rte", data=broken)
    parquet.write_table(pa.table(table).slice(0, 0), broken / "rte" / "validation.parquet")
    fails("rte/validation.parquet: expected at least one row, got none", task="rte", data=broken)
