"""The benchmark's arithmetic, its checks, and the command end to end; no test depends on how long anything takes."""

import csv
import io
import json
from dataclasses import asdict, fields, replace

import pytest
import torch

import whereformer
from tests.failing import fails, refusals
from whereformer.cli.main import main
from whereformer.errors import InputError
from whereformer.lab.progress import Progress
from whereformer.studies.bench import cases, timing, ways
from whereformer.studies.bench import run as bench
from whereformer.studies.bench.report import headline, sheet
from whereformer.studies.bench.results import BenchResults, BenchRow

CPU = torch.device("cpu")
ROW = BenchRow("bias", 8, 2, 2, 4, "float32", "training", "cpu", 1, "sdpa", measured="2000-01-01")


def measure(*ways, n=8, memory_limit=2**33):
    """The rows of all ways, by direction and way."""
    both = [cases.Case("bias", n, 2, 2, 4, "float32", direction) for direction in ("forward", "training")]
    rows = []
    job = bench.BenchJob(cases=both, ways=ways, device=CPU, memory_limit=memory_limit, rounds=3, threads=1)
    job.measure(rows.extend, Progress())
    return {(row.direction, row.way): row for row in rows}


def changed(name, change):
    """The blockwise way, on a problem that ``change`` makes another."""
    return ways.Way(name, lambda problem: ways.backend("blockwise").prepare(change(problem)))


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("direction", ["forward", "training"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_every_way_computes_every_kind_of_case(kind, direction, dtype):
    for way in (ways.FLOOR, ways.CAUSAL, ways.DENSE, ways.backend("reference"), ways.backend("blockwise")):
        if way.does(kind):
            assert ways.check(way, kind, 16, dtype, direction, CPU) < ways.TOLERANCE[dtype]


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("n", [1, 7])
def test_odd_lengths(kind, n):
    problem = cases.make_problem(cases.Case(kind, n, 1, 2, 4, "float32", "training"), CPU)
    for way in (ways.FLOOR, ways.DENSE, ways.backend("auto")):
        if way.does(kind):
            assert ways.make_step(way, problem)()[0].shape == problem.query.shape


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (changed("no bias", lambda p: replace(p, parameters={"table": 0 * p.parameters["table"]})), "output"),
        (changed("detached", lambda p: replace(p, value=p.value.detach() + 0 * p.value)), "gradient of value"),
        (changed("no number", lambda p: replace(p, key=p.key * float("nan"))), "output"),
    ],
)
def test_a_wrong_way_is_caught_and_not_timed(way, expected):
    row = measure(way)["training", way.name]
    assert f"wrong: {expected} is off by" in row.note
    assert row.ratio is None
    assert row.seconds == ()


def test_a_shape_that_broadcasts_is_wrong_all_the_same():
    way = ways.Way("first row", lambda p: lambda: ways.backend("auto").prepare(p)()[:1])
    assert "wrong: output has shape" in measure(way)["forward", "first row"].note


def test_a_way_that_raises_is_a_row_that_says_why():
    def prepare(problem):
        raise NotImplementedError("not on\na Tuesday")

    found = measure(ways.Way("rests", prepare), ways.backend("auto"))
    assert found["forward", "rests"].note == "NotImplementedError: not on a Tuesday"
    assert found["forward", "rests"].ratio is None
    assert found["forward", "auto"].ratio > 0


def test_what_needs_too_much_memory_is_not_tried():
    found = measure(ways.DENSE, n=64, memory_limit=2**17)
    assert "would need 0.0 GiB, the limit is 0.0" in found["training", "sdpa+bias"].note
    assert found["forward", "sdpa"].ratio == 1.0
    assert measure(ways.DENSE, n=64, memory_limit=1)["forward", "sdpa+bias"].note


def test_without_plain_attention_there_is_nothing_to_compare_with(monkeypatch):
    monkeypatch.setattr(bench, "FLOOR", ways.Way("sdpa", lambda problem: 1 / 0))
    row = measure(ways.backend("auto"))["forward", "auto"]
    assert row.note == "nothing to compare with: ZeroDivisionError: division by zero"


def test_ratios_are_taken_within_rounds():
    row = bench.timings([2.0, 30.0, 4.0], [1.0, 10.0, 4.0])
    assert (row["ratio"], row["lowest"], row["highest"]) == (2.0, 1.0, 3.0)
    assert row["milliseconds"] == 4000.0


def test_short_calls_are_repeated_until_they_can_be_measured():
    clock = timing.Clock(CPU, 1)
    ticks = iter([0.0, 0.001, 0.001, 0.025])
    clock.now = lambda: next(ticks)
    calls = []
    assert clock.seconds(lambda: calls.append(None)) == pytest.approx(0.024 / 24)
    assert len(calls) == 1 + 24


def test_memory_is_extrapolated_by_its_linear_and_its_square_part():
    def needed(n):
        return 100 * n + 3 * n * n

    assert timing.extrapolate((8, needed(8)), (16, needed(16)), 64) == needed(64)
    assert timing.extrapolate((8, 900), (16, 1600), 64) == 6400  # what grows more slowly is taken as linear


def test_results_are_read_back_as_they_were(tmp_path):
    rows = [
        replace(ROW, ratio=1.25, lowest=1.0, highest=1.5, milliseconds=2.0, memory=3, error=1e-7, seconds=(0.1, 0.2)),
        replace(ROW, way="other", note='cannot: "why", he asked'),
    ]
    BenchResults.begin(tmp_path, CPU).with_rows(rows).save(tmp_path)
    found = BenchResults.load(tmp_path / "results.json")
    assert found.rows == rows
    assert found.machine["cpu"]
    assert found.versions["torch"] == torch.__version__
    lines = list(csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text())))
    assert set(lines[0]) == {column.name for column in fields(BenchRow)} - {"seconds"}
    for line, row in zip(lines, rows, strict=True):
        assert line == {
            name: "" if value is None else str(value) for name, value in asdict(row).items() if name in line
        }


def test_a_second_run_replaces_what_it_measured_again_and_keeps_the_rest(tmp_path):
    BenchResults.begin(tmp_path, CPU).with_rows([ROW, replace(ROW, n=16)]).save(tmp_path)
    results = BenchResults.begin(tmp_path, CPU).with_rows([replace(ROW, note="again")])
    assert {row.n: row.note for row in results.rows} == {8: "again", 16: ""}


def test_results_of_another_machine_are_left_alone(tmp_path, capsys):
    BenchResults.begin(tmp_path, CPU).with_rows([ROW]).save(tmp_path)
    path = tmp_path / "results.json"
    results = BenchResults.load(path)
    replace(results, versions={**results.versions, "torch": "1.0"}).write(path)
    before = path.read_bytes()
    assert "has results with torch 1.0" in fails(capsys, "bench", "--quick", "--out", str(tmp_path))
    assert path.read_bytes() == before
    path.write_text("{")
    assert "is not a complete result" in fails(capsys, "bench", "--quick", "--out", str(tmp_path))
    assert path.read_text() == "{"


def timed(**more):
    return replace(ROW, ratio=1.2, lowest=1.1, highest=1.3, milliseconds=2.0, **more)


def test_the_headline_has_the_range_of_each_way():
    rows = [timed(way="auto"), replace(timed(way="auto", n=16), ratio=1.5), timed(way="sdpa+bias")]
    assert headline(rows).endswith(" without positions: auto 1.20 to 1.50, sdpa+bias 1.20.")
    assert headline([ROW]) == "No training with positions could be timed."


def test_the_table_has_the_reasons_for_missing_numbers_below():
    rows = [timed(way="sdpa"), replace(ROW, way="auto", note="too [large]"), replace(ROW, way="x", note="too [large]")]
    found = sheet(rows)
    assert [[cell.text for cell in row.cells][-2] for row in found.rows] == ["2 ms", "cannot [1]", "cannot [1]"]
    assert found.notes[:-1] == ("[1] too [large]",)
    several = sheet([*rows, replace(ROW, dtype="bfloat16")])
    assert [column.name for column in several.columns][:3] == ["terms", "dtype", "n"]


TINY = ["--lengths", "16", "--batch", "2", "--heads", "2", "--head-dim", "8"]


def test_the_command_measures_prints_and_writes(tmp_path, capsys):
    options = ["--quick", "--rounds", "2", "--terms", "bias,shaw", "--dtypes", "float32,bfloat16"]
    main(["bench", *TINY, *options, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if "wrote" not in line) <= 100
    assert "results.json" in out
    data = json.loads((tmp_path / "results.json").read_text())
    rows = data["rows"]
    ways = {(row["terms"], row["way"]) for row in rows}
    assert ways == {("bias", "sdpa"), ("bias", "auto"), ("bias", "sdpa+bias"), ("shaw", "sdpa"), ("shaw", "auto")}
    assert len(rows) == 5 * 2 * 2
    assert all(row["ratio"] > 0 and row["memory"] > 0 and len(row["seconds"]) == 2 for row in rows)
    assert all(row["ratio"] == 1.0 for row in rows if row["way"] == "sdpa")


def test_the_function_does_what_the_command_does(tmp_path):
    sizes = {"lengths": [16], "batch": 2, "heads": 2, "head_dim": 8, "rounds": 2}
    results = whereformer.bench(terms=["bias", "shaw"], quiet=True, **sizes)
    assert {(row.terms, row.way) for row in results.rows} >= {("bias", "auto"), ("shaw", "sdpa")}
    assert "Time relative to torch's attention" in str(results)
    assert "<table" in results._repr_html_()
    files = {path.name for path in results.save(tmp_path)}
    assert files == {"results.json", "results.csv"}
    assert BenchResults.load(tmp_path).rows == results.rows
    with pytest.raises(InputError, match="terms: expected none, bias"):
        whereformer.bench(terms="tsia")


def test_an_interrupted_command_keeps_the_rounds_it_finished(tmp_path, capsys, monkeypatch):
    measured = []

    def seconds(self, step):
        if len(measured) == 7:  # two rounds of three ways, and one way of the third round
            raise KeyboardInterrupt
        measured.append(step)
        return 1.0

    monkeypatch.setattr(timing.Clock, "seconds", seconds)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--quick", *TINY, "--rounds", "3", "--out", str(tmp_path)])
    assert stop.value.code == 130
    captured = capsys.readouterr()
    assert "interrupted; the measurements so far are kept" in captured.err
    assert "wrote" in captured.out
    rows = BenchResults.load(tmp_path / "results.json").rows
    assert [(row.direction, row.seconds) for row in rows] == [("forward", (1.0, 1.0))] * 3
    measured.clear()
    with pytest.raises(KeyboardInterrupt):
        whereformer.bench(quick=True, lengths=[16], batch=2, heads=2, head_dim=8, quiet=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals("""
        --terms tsia => --terms: expected none, bias, t5, tisa, shaw, factors, padded, causal,
        --terms , => --terms: expected at least one, got none
        --lengths 128,0 => --lengths: expected numbers from 1 to 10000000 separated by commas, got '0'
        --lengths many => --lengths: expected numbers from 1 to 10000000 separated by commas, got 'many'
        --dtypes int8 => --dtypes: expected float32, bfloat16, float16, got 'int8'
        --backends abacus => --backends: expected auto,
        --rounds 0 => --rounds: expected at least 1, got 0
        --batch 0 => --batch: expected at least 1, got 0
        --head-dim -1 => --head-dim: expected at least 1, got -1
        --memory-limit 0 => --memory-limit: expected a positive number, got 0.0
    """),
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, expected, tmp_path, capsys):
    assert expected in fails(capsys, "bench", "--out", str(tmp_path / "out"), *arguments)
    assert not (tmp_path / "out").exists()


def test_a_backend_that_cannot_run_here_says_why(tmp_path, capsys, monkeypatch):
    def attention(*arguments, backend, **options):
        raise ValueError(f"backend {backend!r} needs a GPU")

    monkeypatch.setattr(cases, "attention", attention)
    message = fails(capsys, "bench", "--quick", "--backends", "blockwise", "--out", str(tmp_path / "out"))
    assert "--backends: blockwise can't run here: ValueError: backend 'blockwise' needs a GPU" in message
