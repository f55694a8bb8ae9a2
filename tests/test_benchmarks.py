"""Every benchmark runs, in a setting that takes seconds, and its file says where its numbers come from."""

import importlib
import json
import re
import runpy
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import whereformer
from whereformer import provenance
from whereformer.cli.main import main as cli
from whereformer.data.tokenizers import fit_tokenizer
from whereformer.recipes.compare import load

from .recipes import parallel_text, sentence_models
from .recipes.finetuning import save_glue

FOLDER = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the package is tested without its benchmarks")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a benchmark as a command and returns what it prints; in this process, which has imported its libraries."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        monkeypatch.syspath_prepend(FOLDER)
        try:
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        return capsys.readouterr().out

    return run


def results_of(path):
    """A benchmark's results, once it is sure that they say where they come from."""
    results = json.loads(path.read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", results["date"])
    assert results["commit"] == provenance.commit()
    assert results["machine"]["cpu"]
    assert results["versions"]["torch"] == torch.__version__
    assert results["versions"]["whereformer"] == whereformer.__version__
    return results


def save_table(file, **columns):
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), file)


def save_bert(folder):
    """A checkpoint of transformers, with a tokenizer."""
    from transformers import BertConfig, BertForMaskedLM

    tokenizer = fit_tokenizer(parallel_text.pairs()[0], 120)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(vocab_size=max(tokenizer.get_vocab().values()) + 1, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def attention(run, tmp_path):
    run(
        "attention",
        *("--terms=shaw", "--lengths=8", "--dtypes=float32", "--rounds=1", "--heads=2", "--head-dim=8", "--batch=1"),
        *("--backends=auto", f"--out={tmp_path}"),
    )
    rows = results_of(tmp_path / "results.json")["rows"]
    assert {row["way"] for row in rows} >= {"auto", "shaw:tensor2tensor"}
    assert {row["commit"] for row in rows} == {provenance.commit()}
    table = (tmp_path / "goals.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "| Shaw, keys and values | float32 training | - |" in table


def tiny_comparison(tmp_path):
    """A text, and options of a comparison that takes no time."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the cat saw dog {number} near the house. where is it?" for number in range(900)))
    small = {"length": 8, "hidden_size": 8, "num_heads": 1, "blocks": "1", "vocab_size": 64, "batch_size": 2}
    return text, small | {"rate_factors": "1"}


def properties(run, tmp_path):
    text, small = tiny_comparison(tmp_path)
    whereformer.compare(data=text, positions="none,learned,tisa", steps=2, **small, out=tmp_path / "runs", quiet=True)
    printed = run("properties", tmp_path / "runs", f"--out={tmp_path / 'results.json'}")
    ticks = results_of(tmp_path / "results.json")["properties"]
    assert [has_property for has_property, _ in ticks["tisa"].values()][1:] == [True] * 5
    assert ticks["learned"]["inductive"] == [False, "cannot"]
    assert ticks["learned"]["translation invariant"][0] is False
    assert "no*" not in printed


def verdicts(run, tmp_path):
    text, small = tiny_comparison(tmp_path)
    short, long, tasks = tmp_path / "short", tmp_path / "long", tmp_path / "tasks"
    for out, steps in ((short, 2), (long, 4)):
        whereformer.compare(data=text, positions="none,learned", steps=steps, seeds=2, **small, out=out, quiet=True)
    whereformer.probe(positions="none,tisa", tasks="previous", length=4, steps=1, jobs=1, out=tasks, quiet=True)
    shutil.copytree(tasks, tmp_path / "again")
    printed = run("verdicts", short, long, tasks, tmp_path / "again", f"--out={tmp_path / 'verdicts.json'}")
    counts = results_of(tmp_path / "verdicts.json")["verdicts"]
    assert "a task that a method fails (1): 1 failed\n" in printed
    assert counts["a method that solves the most tasks, after too few steps for a verdict"] == {"still does": 1}
    assert sum(counts["2 seeds: a method that is not learning yet"].values()) == 1
    assert sum(counts["1 seed: a method that is not learning yet"].values()) == 2


def extend(run, tmp_path):
    """Two models of random weights: one vector of a document and its chunks are compared on the same passages."""
    words = Path(parallel_text.__file__).read_text()
    model = sentence_models.save(tmp_path / "bert", sentence_models.bert(), words)
    documents = sentence_models.save_documents(tmp_path / "documents.jsonl", words)
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"sentence1": "the cat", "sentence2": f"the {word}", "label": index} for index, word in enumerate("abc")]
    pairs.write_text("\n".join(map(json.dumps, rows)))
    whereformer.extend(model=model, data=documents, length=48, steps=1, out=tmp_path / "longer", quiet=True)
    paths = (f"--model={model}", f"--documents={documents}", f"--pairs={pairs}", f"--extended={tmp_path / 'longer'}")
    small = ("--length=48", "--count=20", "--passages=3", "--passage=8", "--chunks", "30", "10")
    run("extend", *paths, *small, f"--out={tmp_path / 'out'}")
    scores = results_of(tmp_path / "out" / "results.json")["rows"]
    chunks = ["mean of chunks of 30", "mean of chunks of 10", "a vector for each chunk"]
    assert list(scores) == ["as it is", *chunks, "repeated, untrained", "longer"]
    assert all(len(row["by_place"]) == 3 and 0 < row["found"] <= 1 for row in scores.values())
    # Both give the original's vectors of short texts.
    assert all(scores[name]["spearman"] == scores["as it is"]["spearman"] for name in (*chunks, "repeated, untrained"))


def longembed(run, tmp_path):
    """Every row finds some of the sentences, or none: the models' weights are random."""
    words = Path(parallel_text.__file__).read_text()
    model = sentence_models.save(tmp_path / "bert", sentence_models.bert(), words)
    text = sentence_models.save_documents(tmp_path / "documents.jsonl", words)
    whereformer.extend(model=model, data=text, length=48, steps=0, out=tmp_path / "longer", quiet=True)
    small = ("--lengths=120", "--queries=2", "--candidates=4", f"--extended={tmp_path / 'longer'}")
    run("longembed", f"--model={model}", f"--text={text}", *small, f"--out={tmp_path / 'out'}")
    rows = results_of(tmp_path / "out" / "results.json")["rows"]
    assert {"cut off", "mean of chunks", "each chunk", "positions stretched", "extend, untrained", "longer"} < {*rows}
    assert {scores["ndcg@1"] for row in rows.values() for scores in row.values()} <= {0, 0.5, 1}
    assert all({*row} == {"passkey 120", "needle 120"} for row in rows.values())


def distilled(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(parallel_text.pairs()[0] * 3))
    model = save_bert(tmp_path / "seed" / "model")
    options = (f"--models={model}", f"--data={text}", "--kernels=1,3", "--longer=600", f"--out={tmp_path / 'out'}")
    run("distilled", *options, "--fit-tokens=64", "--held-out-tokens=64")
    (variants,) = results_of(tmp_path / "out" / "results.json")["models"].values()
    # A layer of two heads with three numbers a kernel, and BERT's table of 512 positions of width 16.
    numbers = {"as trained": 512 * 16, "without positions": 0, "S=1": 6, "S=3": 18}
    assert {variant: measured["numbers"] for variant, measured in variants.items()} == numbers
    assert [list(measured["losses"]) for measured in variants.values()] == [["512"], ["512"], *[["512", "600"]] * 2]


def funnel_pays(run, tmp_path):
    """Parts that are finished are not repeated, and other settings are refused."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(parallel_text.pairs()[0] * 3))
    for name, count in (("train", 8), ("test", 4)):
        rows = {"text": parallel_text.pairs()[0][:count], "label": [0, 1] * (count // 2)}
        save_table(tmp_path / "task" / f"{name}.parquet", **rows)

    def pays(*extra):
        run(
            "funnel_pays",
            *(f"--text={text}", f"--data={tmp_path}", "--inputs=task:16,task:32", "--evaluations=1"),
            *("--pretrain-seconds=0.01", "--finetune-seconds=0.01", "--batch-tokens=64", "--hidden-size=32"),
            *("--vocab-size=300", f"--out={tmp_path / 'out'}", *extra),
        )
        return results_of(tmp_path / "out" / "results.json")["models"]

    first = pays()
    assert first["plain+tisa"][0].keys() == {"seed", "pretraining", "task-16", "task-32"}
    assert first["funnel+tisa"][0]["task-16"]["gflops_of_a_row"] < first["funnel+tisa"][0]["task-32"]["gflops_of_a_row"]
    again = pays("--seeds=2")
    assert [model["seed"] for model in again["plain+tisa"]] == [0, 1]
    assert again["plain+tisa"][0] == first["plain+tisa"][0]
    with pytest.raises(SystemExit, match="2"):
        pays("--evaluations=2")


def gpu_check(run, tmp_path):
    out = tmp_path / "gpu.json"
    if torch.cuda.is_available():
        run("gpu_check", "--quick", f"--out={out}")
        assert not [part for part, result in results_of(out).items() if isinstance(result, dict) and "error" in result]
    else:
        with pytest.raises(SystemExit, match="needs an NVIDIA GPU, found none"):
            run("gpu_check", "--quick", f"--out={out}")
        pytest.importorskip("triton")
        # What it would check on a GPU, in short and in the interpreter.
        check = runpy.run_path(str(FOLDER / "gpu_check.py"))
        check["correct"].__globals__["DEVICE"] = "cpu"
        interpreter = importlib.import_module("tests.kernels.interpreter")
        interpreter.mend()
        for name, option in (("none", ""), ("shaw", "causal"), ("t5", "window"), ("bias", "ids"), ("decay", "")):
            result = check["correct"](name, option, 20, dim=16)
            assert result["ok"], result
            assert result["same bits ten times"]


def gpu_static(run, tmp_path):
    """It also holds the counts that were reached: no spilled registers but those of the page, and few instructions."""
    triton = pytest.importorskip("triton")
    if not (Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm").exists():
        pytest.skip("needs the disassembler in Triton's package")
    # Triton decides when it is imported whether it interprets, as it does in this process.
    command = [sys.executable, str(FOLDER / "gpu_static.py"), "--dtypes=bfloat16"]
    known = json.loads((FOLDER / "results" / "gpu_static.json").read_text())["exceeded"]
    cases = (
        ("80,89,90,100,120", "plain,bias", 64),
        ("80,90,100", "shaw", 64),
        ("90", "window", 64),
        ("80,90,120", "plain,bias", 128),
    )
    for gpus, terms, dim in cases:
        out = tmp_path / f"{terms}-{dim}.json"
        choice = [f"--terms={terms}", f"--dims={dim}", f"--gpus={gpus}", f"--out={out}"]
        subprocess.run([*command, *choice], check=True, capture_output=True)
        facts = results_of(out)
        assert {row["kernel"] for row in facts["kernels"]} >= {"forward", "query_gradients", "key_gradients"}
        units = {90: "HGMMA", 100: "UTCHMMA"}
        assert all(
            row["products"].startswith(units.get(row["gpu"], "HMMA")) for row in facts["kernels"] if row["instructions"]
        )
        # Other versions compile to other counts.
        if triton.__version__.startswith("3.7."):
            assert {line.split(":")[0] for line in facts["exceeded"]} <= {line.split(":")[0] for line in known}


def packed(run, tmp_path):
    texts = parallel_text.pairs()[0]
    for folder, column in (("glue/stsb", "sentence1"), ("20newsgroups", "text"), ("wikitext2", "text")):
        save_table(tmp_path / folder / "train.parquet", **{column: texts})
    model = sentence_models.save(tmp_path / "bert", sentence_models.bert(), "\n".join(texts))
    small = ("--texts=6", "--batch=3", "--positions=learned", "--rounds=1", f"--out={tmp_path / 'packed.json'}")
    run("packed", model, tmp_path, *small)
    rows = results_of(tmp_path / "packed.json")["results"]
    assert [row["pass"] for row in rows] == ["inference", "training"] * 3


def seed_noise(run, tmp_path):
    """It measures nothing, but reads what ``whereformer compare`` has measured."""
    tiny = {"length": 16, "hidden_size": 16, "blocks": "1", "vocab_size": 64, "characters": 50_000, "rate_factors": "1"}
    whereformer.compare(positions="none,learned", steps=2, seeds=2, jobs=1, out=tmp_path / "out", quiet=True, **tiny)
    _, runs = load(tmp_path / "out")
    gaps = [runs["none"][seed].loss - runs["learned"][seed].loss for seed in (0, 1)]
    noise = statistics.stdev(gaps)
    assert f"standard deviation of a gap over seeds: {noise:.3f} nats" in run("seed_noise", tmp_path / "out")


def speed_picture(run, tmp_path):
    """The picture of the README says the same as the results in this repository."""
    results = FOLDER / "results" / "amd-epyc-2-cores-avx512" / "results.json"
    run("speed_picture", f"--results={results}", f"--out={tmp_path / 'speed.svg'}")
    assert (tmp_path / "speed.svg").read_text() == (FOLDER.parent / "docs" / "images" / "speed.svg").read_text()


def tisa_from_start(run, tmp_path):
    """A second call gathers what is there. Both methods have a loss and a score; only one has embeddings to judge."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(parallel_text.pairs()[0] * 3))
    glue = save_glue(tmp_path / "glue", "sst2", rows=8)

    def start():
        run(
            "tisa_from_start",
            *(f"--data={text}", f"--glue={glue}", "--methods=learned,tisa", "--tasks=sst2", "--seeds=1"),
            *("--steps=10", "--length=16", "--batch-size=2", "--hidden-size=32", "--vocab-size=200"),
            *("--epochs=1", f"--out={tmp_path / 'out'}"),
        )
        return results_of(tmp_path / "out" / "results.json")["methods"]

    methods = start()
    assert [point["step"] for point in methods["learned"][0]["toeplitzness"]] == list(range(1, 11))
    assert methods["tisa"][0]["toeplitzness"] == []
    assert 0 <= methods["tisa"][0]["glue"]["sst2"] <= 1
    assert start() == methods


def translation(run, tmp_path):
    data = tmp_path / "data"
    source, target = parallel_text.pairs()
    for name, rows in (("train", slice(0, 60)), ("validation", slice(60, 70)), ("test", slice(70, 74))):
        save_table(data / f"{name}.parquet", en=source[rows], de=target[rows])
    run(
        "translation",
        *(f"--data={data}", "--languages=de", "--methods=sinusoidal", "--seeds=1", "--steps=2", "--batch-tokens=256"),
        *("--hidden-size=16", "--intermediate-size=32", "--warmup=1", f"--out={tmp_path}"),
    )
    assert results_of(tmp_path / "results.json")["languages"]["de"]["sinusoidal"]["seeds"]["0"]["bleu"] >= 0


def ctranslate(run, tmp_path):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    lines = parallel_text.pairs()
    cli(["translate", "train", *parallel_text.write(tmp_path, *lines), *parallel_text.TINY, f"--out={tmp_path}"])
    save_table(tmp_path / "test.parquet", en=lines[0][:8], de=lines[1][:8])
    run("ctranslate", f"--model={tmp_path / 'model'}", f"--data={tmp_path / 'test.parquet'}", f"--out={tmp_path}")
    rows = results_of(tmp_path / "results.json")["rows"]
    assert (rows["CTranslate2, float32, beams 1"]["same"], len(rows)) == (8, 6)


def which_position(run, tmp_path):
    """The tables and the pictures say the same as the results in this repository."""
    printed = run("which_position", f"--results={FOLDER / 'results'}", f"--out={tmp_path}")
    docs = FOLDER.parent / "docs"
    page = (docs / "results" / "which-position.md").read_text()
    assert all(table in page for table in printed.strip().split("\n\n"))
    pictures = sorted((docs / "images").glob("which-position-*.svg"))
    assert [(tmp_path / file.name).read_text() for file in pictures] == [file.read_text() for file in pictures]


SIMPLE = {
    "exactness": (
        "--lengths=20 --kinds=shaw --heads=1",
        lambda results: (
            set(results["quotients"]["bfloat16 shaw"]["20"]) == {"output", "query", "key", "value", "keys", "values"}
        ),
    ),
    "generation": (
        "--decoding=8x1 --translation=none --rounds=1",
        lambda results: [row["model"] for row in results["rows"]] == ["its own", "none", "t5", "tisa", "shaw", "rope"],
    ),
    "images": ("--cases=2x2x3x4x8 --rounds=1", lambda results: len(results["rows"]) == 2),  # forward and training
    "memory": ("--length=64 --steps=3", lambda results: set(results["peak_mib"]["torch"]) == {"float32", "bfloat16"}),
    "models": (
        "--models=bert,t5,modernbert,deberta,encoders,funnel,funnel+decoder --lengths=16 --tokens=16 --layers=3"
        " --rounds=1 --dtypes=float32",
        lambda results: len(results["rows"]) == 2 * (4 * 2 + 7 + 2 * 5),  # forward and training; pairs, and encoders
    ),
    "per_call": ("--rounds=1", lambda results: results["calls"]["torch"]["forward"]["ratio"] == 1),
    "sound": (
        "--models=wav2vec2-bert --minutes=0.2 --width=64 --limit=1",
        lambda results: [row["way"] for row in results["rows"]] == ["eager", "sdpa", "attached"] * 2,
    ),
    "windows": ("--length=300 --heads=1 --rounds=1", lambda results: len(results["seconds"]) == 8),
}
"""Benchmarks that need no data, with options and what their results have to be."""

HELPERS = {
    *("attention_kinds", "attention_peers", "attention_ways"),
    *("benchmark", "distillation", "goals", "parts", "peak", "pictures", "position_properties", "result_files"),
    "side_by_side",
}
"""Files that benchmarks share."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [file.stem for file in sorted(FOLDER.glob("*.py")) if file.stem not in HELPERS])
def test_benchmark_runs(name, run, tmp_path):
    if name not in SIMPLE:
        assert name in globals(), "a new benchmark needs a smoke test here"
        globals()[name](run, tmp_path)
        return
    words, holds = SIMPLE[name]
    run(name, *words.split(), f"--out={tmp_path / 'results.json'}")
    results = results_of(tmp_path / "results.json")
    assert holds(results), results


def test_costs_are_measured_in_turns_and_divided_within_a_round(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    shared = importlib.import_module("side_by_side")
    costs = shared.by_turns({"one": iter([9, 1, 2]).__next__, "other": iter([9, 2, 8]).__next__}, 2)
    assert costs == {"one": [1, 2], "other": [2, 8]}
    assert shared.ratios_by_round(costs, "one") == {"one": [1, 1], "other": [2, 4]}


@pytest.mark.parametrize("processes", [1, 2])
def test_tasks_are_done_in_processes(monkeypatch, processes):
    monkeypatch.syspath_prepend(FOLDER)
    done = importlib.import_module("parts").in_processes(abs, [-2, -1], processes)
    assert dict(done) == {-2: 2, -1: 1}


def test_medians_over_seeds_decide_whether_longer_text_is_read_as_well(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    inductive = importlib.import_module("properties").inductive

    def runs(*losses):
        """A model for each pair of losses, at the training length and at four times that."""
        return {
            seed: SimpleNamespace(loss=loss, scores=[[loss, 0], [long, 0]]) for seed, (loss, long) in enumerate(losses)
        }

    baseline = runs((5.0, 5.1))
    assert inductive(runs((3.0, 3.05)), baseline, 1) == (True, "+0.05")
    assert inductive(runs((3.0, 3.12)), baseline, 1) == (False, "+0.12")
    assert inductive(runs((3.0, 3.5), (3.0, 3.0), (3.0, 3.02)), baseline, 1) == (True, "+0.02")
    assert inductive(runs((4.95, 4.97)), baseline, 1) == (None, "+0.02")  # it has little to lose
    assert inductive(runs((4.95, 4.97)), {}, 1) == (True, "+0.02")


def test_a_longer_comparison_keeps_a_verdict_or_not(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    compare = importlib.import_module("verdicts").compare_rankings

    def models(**losses):
        return {name: {0: SimpleNamespace(loss=loss, windows=[loss] * 4)} for name, loss in losses.items()}

    short = models(none=5.0, rope=3.0, t5=3.01, learned=3.6)
    unchanged = set(compare(short, short, "none", 400))
    assert {("a settled gap", "still clear"), ("a gap that may close", "still clear")} <= unchanged
    assert ("two methods that are too close to rank", "still too close") in unchanged
    assert {
        ("a method that is to take", "among the best"),
        ("a method that is left out", "not among the best"),
    } <= unchanged
    changed = set(compare(short, models(none=5.0, rope=3.0, t5=3.5, learned=2.5), "none", 400))
    assert ("a settled gap", "reversed") not in changed
    assert {("a gap that may close", "reversed"), ("a method that may catch up", "among the best")} <= changed
    assert ("two methods that are too close to rank", "one is clearly better") in changed
    assert ("a method that is to take", "not among the best") in changed


@pytest.fixture
def timing(monkeypatch):
    """The benchmark of attention, as a module."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("attention")


def test_every_way_computes_every_kind_of_case(timing):
    ways = timing.FLOOR, *timing.TORCH, timing.backend("reference"), timing.backend("blockwise")
    for kind in timing.KINDS:
        for way in ways:
            if way.does(kind):
                for direction in ("forward", "training"):
                    assert timing.check(way, kind, 16, "float32", direction) < 1e-4


def measured(timing, prepare, direction="training"):
    """The row of a way to compute a bias."""
    case = timing.Case("bias", 8, 2, 2, 4, "float32", direction)
    way = timing.Way("tried", prepare)
    rows = timing.measure(case, [way, timing.backend("auto")], 2)
    return next(row for row in rows if row["way"] == "tried")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda p: {"parameters": {"table": 0 * p.parameters["table"]}}, "wrong: output is off by"),
        (lambda p: {"value": p.value.detach() + 0 * p.value}, "wrong: gradient of value is off by"),
        (lambda p: {"key": p.key * float("nan")}, "wrong: output is off by"),
    ],
)
def test_a_wrong_way_is_caught_and_not_timed(timing, change, expected):
    prepare = timing.backend("blockwise").prepare
    row = measured(timing, lambda problem: prepare(replace(problem, **change(problem))))
    assert expected in row["note"]
    assert row["ratio"] is None
    assert "seconds" not in row


def test_a_way_of_another_shape_or_that_raises_says_so(timing):
    prepare = timing.backend("auto").prepare
    assert "wrong: output has shape" in measured(timing, lambda p: lambda: prepare(p)()[:1], "forward")["note"]
    assert measured(timing, lambda problem: 1 / 0)["note"] == "ZeroDivisionError: division by zero"
    assert measured(timing, prepare)["ratio"] > 0
