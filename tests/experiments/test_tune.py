"""Measuring thresholds: the ways that are compared, the arithmetic, and the command; nothing depends on real times."""

import importlib
import io
import json
from dataclasses import fields, replace

import pytest
import torch
from rich.console import Console

from tests.failing import fails, refusals
from tests.onednn import need_onednn
from whereformer.cli.main import main
from whereformer.cli.tables.tune import print_tuning
from whereformer.experiments.bench import timing, tune, workloads
from whereformer.kernels import tuning
from whereformer.kernels.cpu import blockwise, fused_bias, short
from whereformer.kernels.cpu.workspace import Workspace
from whereformer.runs.progress import Progress

SIZES = workloads.TuneSizes(rounds=2, quick=False, batch=1, heads=1, head_dim=8, longest=400)
SLOW, FAST = workloads.TunedWay("reference"), workloads.TunedWay("blockwise")


@pytest.fixture
def instant(monkeypatch):
    """Every call takes a second, and none is made."""
    monkeypatch.setattr(timing.Clock, "seconds", lambda self, step: 1.0)


def workload(ways):
    return workloads.Workload("a call", 1, lambda: lambda backend: lambda: None, ways)


def test_every_threshold_is_measured():
    need_onednn()
    every = frozenset({torch.float32, torch.bfloat16})
    with tuning.use(onednn=True, fused_dtypes=every, fused_backward_dtypes=every):
        found = {setting.field for setting in workloads.settings(workloads.TuneSizes(rounds=1, quick=False))}
    assert found == {field.name for field in fields(tuning.Tuning)} - {"processor"}


@pytest.mark.parametrize("quick", [False, True])
def test_the_value_that_holds_is_among_those_tried(quick):
    with tuning.use(written_out_scores=12345, kept_scores=0, tile_scores=3, fused_dtypes=frozenset()):
        found = workloads.settings(workloads.TuneSizes(rounds=1, quick=quick))
        held = {setting.field: setting.now for setting in found if setting.dtype is None}
    for setting in found:
        for each in setting.workloads:
            assert setting.now in each.ways
            assert list(each.ways) == setting.values
    assert (held["written_out_scores"], held["kept_scores"], held["tile_scores"]) == (12345, 0, 3)


def test_values_take_the_ways_that_they_stand_for(monkeypatch):
    """Each way is run; what it goes through decides, not what it is called."""
    went = set()

    def watch(name, function):
        def watched(*arguments, **options):
            went.add(name)
            return function(*arguments, **options)

        return watched

    backends = importlib.import_module("whereformer.kernels")._RUN
    monkeypatch.setitem(backends, "reference", watch("reference", backends["reference"]))
    monkeypatch.setattr(short, "forward", watch("short", short.forward))
    monkeypatch.setattr(blockwise, "forward", watch("rows", blockwise.forward))
    for name in ("forward", "backward", "reversed_rows"):
        monkeypatch.setattr(fused_bias, name, watch(f"fused {name}", getattr(fused_bias, name)))
    tells = {
        "written_out_scores": lambda value, n: ("reference", n * n <= value),
        "kept_scores": lambda value, n: ("short", n * n <= value),
        "kept_tile_scores": lambda value, n: ("short", True),
        "tile_scores": lambda value, n: ("rows", True),
        "fused_dtypes": lambda value, n: ("fused forward", value),
        "fused_backward_dtypes": lambda value, n: ("fused backward", value),
        "unturned_scores": lambda value, n: ("fused reversed_rows", n * n > value),
    }
    seen = set()
    for setting in workloads.settings(SIZES):
        if setting.field not in tells:
            continue
        if setting.dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() != "AVX512":
            # Where a processor has AMX and PyTorch was told to leave AVX-512 alone, its kernel raises.
            continue
        for each in setting.workloads:
            n = int(each.label.partition("n=")[2].split()[0])
            make = each.prepare()
            for value, way in each.ways.items():
                went.clear()
                tune._with_changes(way, make(way.backend))()
                name, expected = tells[setting.field](value, n)
                assert (name in went) == expected, (setting.label, each.label, value)
                seen.add((setting.field, expected))
                if "tile" in setting.field:
                    assert dict(way.changes)[setting.field] == value
    assert {field for field, _ in seen} == tells.keys()
    assert len(seen) == 2 * len(tells) - 2
    assert tuning.current() == tuning._measured()


def test_what_has_no_ways_to_compare_is_left_out():
    short_calls = workloads.settings(workloads.TuneSizes(rounds=1, quick=True, longest=64))
    assert "kept_scores" not in {setting.field for setting in short_calls}
    assert all(len(set(each.ways.values())) > 1 for setting in short_calls for each in setting.workloads)


def test_values_are_judged_by_the_mean_of_logarithms_in_each_round():
    ways = [{1: FAST, 2: SLOW, 3: SLOW}, {1: FAST, 2: FAST, 3: SLOW}]
    setting = workloads.TunedSetting("kept_scores", 2, [workload(each) for each in ways])
    times = [[{FAST: 1.0, SLOW: 2.0}] * 3, [{FAST: 1.0, SLOW: 4.0}, {FAST: 1.0, SLOW: 1.0}, {FAST: 1.0, SLOW: 4.0}]]
    row = tune.judge(setting, times)
    assert row.ratios == pytest.approx({"1": 0.5**0.5, "2": 1.0, "3": 2.0})
    assert (row.now, row.best, row.better) == (2, 1, True)
    assert (row.ratio, row.lowest, row.highest) == pytest.approx((0.5**0.5, 0.5**0.5, 0.5**0.5))


@pytest.mark.parametrize(
    ("rounds", "best", "better"),
    [
        ([0.9, 0.9, 0.9], True, True),
        ([0.9, 0.9, 1.01], True, False),  # not in every round
        ([0.98, 0.98, 0.98], True, False),  # too little
        ([1.0, 1.0, 1.0], False, False),  # the same: what holds stays
        ([1.1, 1.2, 1.3], False, False),
    ],
)
def test_a_difference_within_noise_changes_nothing(rounds, best, better):
    setting = workloads.TunedSetting("onednn", False, [workload({True: FAST, False: SLOW})])
    row = tune.judge(setting, [[{FAST: ratio, SLOW: 1.0} for ratio in rounds]])
    assert (row.best, row.better) == (best, better)
    assert tune.lines([row]) == (["onednn=True,"] if better else [])


def test_a_way_that_is_closed_here_puts_its_values_out():
    ways = [{1: FAST, 2: SLOW, 3: SLOW}, {1: SLOW, 2: SLOW, 3: FAST}]
    setting = workloads.TunedSetting("tile_rows", 2, [workload(each) for each in ways])
    row = tune.judge(setting, [[{SLOW: 2.0}], [{SLOW: 2.0, FAST: 1.0}]])
    assert (row.best, row.ratios) == (3, pytest.approx({"2": 1.0, "3": 0.5**0.5}))
    row = tune.judge(setting, [[{FAST: 1.0}], [{SLOW: 2.0, FAST: 1.0}]])
    assert (row.best, row.ratios) == (3, pytest.approx({"1": 1.0, "2": 1.0, "3": 0.5}))
    row = tune.judge(setting, [[{FAST: 1.0}], [{FAST: 1.0}]])
    assert (row.best, row.better) == (2, False)


def test_a_way_that_raises_is_told_and_not_timed(capsys, instant, monkeypatch):
    def attend(call):
        raise RuntimeError("not on\na Tuesday")

    monkeypatch.setitem(importlib.import_module("whereformer.kernels")._RUN, "reference", attend)
    main([*TINY])
    out = capsys.readouterr().out
    assert "failed: bias float32 n=90 forward: RuntimeError: not on a Tuesday" in out


def row(field, best, dtype="", better=True):
    return tune.TuneRow(field, dtype, None, best, 0.5, 0.5, 0.5, better, {}, ())


def test_lines_are_python_that_gives_the_values():
    rows = [
        row("kept_scores", 2**17),
        row("written_out_scores", 300),
        row("tile_rows", 32, better=False),
        row("onednn", True),
        row("fused_dtypes", True, "float16"),
        row("fused_dtypes", False, "float32"),
    ]
    with tuning.use(fused_dtypes=frozenset({torch.float32, torch.float64})):
        written = tune.lines(rows)
    assert written[0] == "kept_scores=2**17,"
    assert eval(f"dict({''.join(written)})", {"torch": torch}) == {
        "kept_scores": 2**17,
        "written_out_scores": 300,
        "onednn": True,
        "fused_dtypes": {torch.float16, torch.float64},
    }


def test_a_way_finds_the_memory_that_it_left_itself(monkeypatch):
    monkeypatch.setattr(Workspace, "_kept", type(Workspace._kept)())
    kept = Workspace._kept.__dict__
    kept["cpu"] = ["of another"]
    clock, memory = timing.Clock(torch.device("cpu"), 1), {}
    seen = []

    def step():
        seen.append(kept.pop("cpu", None))
        kept["cpu"] = ["its own"]

    clock.seconds = lambda step: step() or 1.0
    tune._timed(clock, step, memory, warm=True)
    assert tune._timed(clock, step, memory) == 1.0
    assert seen == [None, ["its own"]]
    assert kept == {"cpu": ["of another"]}


def test_all_settings_are_measured_in_turns(monkeypatch):
    order = []

    def seconds(self, step):
        step()
        order.append(step)
        return 1.0

    monkeypatch.setattr(timing.Clock, "seconds", seconds)
    sizes = workloads.TuneSizes(rounds=2, quick=True, batch=1, heads=1, head_dim=8, longest=200)
    rows = []
    tune.run(sizes, rows.append, Progress())
    expected = workloads.settings(sizes)
    assert [row.label for row in rows] == [setting.label for setting in expected]
    assert len(order) == sum(2 * len(set(each.ways.values())) for setting in expected for each in setting.workloads)
    assert all(row.best == row.now and row.ratio == 1.0 and not row.better for row in rows)


def test_the_table_is_whole_in_80_columns():
    console = Console(width=80, file=io.StringIO())
    found = replace(row("fused_backward_dtypes", 2**17, "bfloat16", better=False), now=300000)
    print_tuning(console, [found, replace(found, better=True, field="fused_dtypes", best=True, now=False)])
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["fused_backward_dtypes", "bfloat16", "300000", "2**17", "0.50", "(0.50-0.50)", "noise"] in lines
    assert ["fused_dtypes", "bfloat16", "no", "yes", "0.50", "(0.50-0.50)", "change"] in lines


TINY = ("bench", "--tune", "--quick", "--rounds", "1", "--batch", "1", "--heads", "1", "--head-dim", "8")


def test_the_command_prints_a_table_and_writes_nothing(tmp_path, capsys, monkeypatch, instant):
    monkeypatch.chdir(tmp_path)
    main([*TINY])
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    held = tune.show(tuning.current().kept_scores)
    assert ["kept_scores", held, held, "-", "keep"] in lines
    assert "nothing to change" in out
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_to_change(tmp_path, capsys, monkeypatch):
    def measure(workload, clock, rounds, progress):
        """Keeping weights is slow."""
        found = {way: 2.0 if dict(way.changes).get("kept_scores") else 1.0 for way in workload.ways.values()}
        return [found] * rounds, []

    monkeypatch.setattr(tune, "_measure", measure)
    main([*TINY, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "kept_scores=2**14," in out.split()
    data = json.loads((tmp_path / "tune.json").read_text())
    assert data["lines"] == ["kept_scores=2**14,"]
    assert data["processor"] == tuning.current().processor
    assert data["sizes"] == {"rounds": 1, "quick": True, "batch": 1, "heads": 1, "head_dim": 8, "longest": 8192}
    (found,) = (row for row in data["rows"] if row["field"] == "kept_scores")
    assert (found["now"], found["best"], found["better"]) == (tuning.current().kept_scores, 2**14, True)


def test_an_interrupted_command_prints_what_it_has(capsys, monkeypatch):
    measured = []

    def measure(workload, clock, rounds, progress):
        if workload.label.startswith("bias, fixed"):
            raise KeyboardInterrupt
        measured.append(workload)
        return [dict.fromkeys(workload.ways.values(), 1.0)], []

    monkeypatch.setattr(tune, "_measure", measure)
    with pytest.raises(SystemExit) as stop:
        main([*TINY])
    assert stop.value.code == 130
    captured = capsys.readouterr()
    assert "tile_scores" in captured.out
    assert "onednn" not in captured.out
    assert "interrupted; the measurements so far are above" in captured.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals("""
        --terms bias => --terms: not with --tune, which has its own calls, on the CPU
        --lengths 128 => --lengths: not with --tune
        --dtypes float32 => --dtypes: not with --tune
        --backends reference => --backends: not with --tune
        --threads 2 => --threads: not with --tune
        --memory-limit 1 => --memory-limit: not with --tune
        --device cuda => --device: not with --tune
        --rounds 0 => --rounds: expected at least 1, got 0
        --head-dim 0 => --head-dim: expected at least 1, got 0
    """),
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, expected, tmp_path, capsys):
    assert expected in fails(capsys, "bench", "--tune", "--out", str(tmp_path / "out"), *arguments)
    assert not (tmp_path / "out").exists()
