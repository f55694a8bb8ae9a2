"""Recipes: their options on the command line and in Python, their record, and their folder."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.failing import fails, largest_file
from tests.lab.report.pages import Page
from tests.lab.toy import Toy
from whereformer import _extras, ranks
from whereformer.cli.flags import parse
from whereformer.cli.main import main
from whereformer.errors import InputError
from whereformer.lab.recipe import as_function
from whereformer.lab.report.report import Figure, Report
from whereformer.lab.run import Run, _Bar, default_jobs, name_key, read_records
from whereformer.lab.terminal import Terminal
from whereformer.manifest import dump_with_hash, fingerprint_of_code
from whereformer.provenance import versions

TOY = str(Path(__file__).with_name("toy.py"))
DOCS = Path(__file__).parents[2] / "docs"
toy = as_function(Toy)


def values(out):
    return {name: record["value"] for name, record in read_records(Path(out) / "records.jsonl")[1].items()}


def numbers(out):
    return {name: value["number"] for name, value in values(out).items()}


def test_an_unknown_option_suggests_the_nearest():
    with pytest.raises(TypeError, match=r"^sed: not an option of toy; did you mean 'seed'\?$"):
        toy(sed=3)


def recipe_of_the_docs(number, name, tmp_path, monkeypatch):
    """Write a recipe of the page about the lab to a file of the current folder."""
    text = (DOCS / "architecture" / "lab.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path(name).write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number])


def test_the_recipe_of_the_docs_runs_from_its_file(tmp_path, monkeypatch, capsys):
    recipe_of_the_docs(0, "count_parameters.py", tmp_path, monkeypatch)
    assert "--positions: unknown position method 'tsia'" in fails(
        capsys, "run", "count_parameters.py", "--positions=tsia"
    )
    assert not Path("runs").exists()
    main(["run", "count_parameters.py", "--positions", "learned,tisa", "--hidden-size", "32", "--out", "out"])
    out = capsys.readouterr().out
    assert re.search(r"learned +16,384", out)
    assert "tisa has the fewest parameters." in out
    command = "whereformer run count_parameters.py --positions learned,tisa --hidden-size 32 --out out"
    assert f"`{command}`" in report_of("out")
    assert "--hidden-size INT" in help_of(capsys, "run", "count_parameters.py")


def test_the_recipe_of_the_docs_that_trains_runs_from_its_file(tmp_path, monkeypatch, capsys):
    recipe_of_the_docs(1, "neighbors.py", tmp_path, monkeypatch)
    main(["run", "neighbors.py", "--positions", "none,rope", "--seeds", "1", "--steps", "3", "--jobs", "1"])
    assert "rope, seed 0: loss" in capsys.readouterr().out
    assert "![Loss over the steps](loss-over-the-steps.svg)" in report_of("runs/neighbors")


@pytest.mark.slow
def test_the_recipe_of_the_docs_that_trains_is_the_same_in_two_processes(tmp_path, monkeypatch):
    recipe_of_the_docs(1, "neighbors.py", tmp_path, monkeypatch)
    from neighbors import Neighbors

    one, two = (
        as_function(Neighbors)(positions="none,rope", seeds=1, steps=3, jobs=jobs, out=f"jobs{jobs}", quiet=True).values
        for jobs in (1, 2)
    )
    assert one == two


def report_of(folder):
    return Path(folder, "report.md").read_text()


OWN = """
from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from whereformer.lab.recipe import MayChange, Recipe
from whereformer.lab.report.report import Report

@dataclass(frozen=True, kw_only=True)
class Own(Recipe):
    "What is measured?"
    NAME = "own"
    out: Annotated[Path, MayChange] = Path("out")

    def run(self, run):
        found = run.map([("a",)], self.measure, task="measure", kind=int)
        return Report("What?", [f"It is {found['a',]}."], values=found)

    def measure(self, run, key):
        from number_beside import NUMBER

        return NUMBER
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("class Own(Recipe)", "class Own(Recipe", ".py, line 10: "),
        ("class Own(Recipe)", "class Own", "FILE: expected one recipe in mistaken_"),
    ],
)
def test_a_file_without_a_recipe_is_refused_in_a_line(old, new, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"mistaken_{abs(hash((old, new)))}"
    Path(f"{name}.py").write_text(OWN.replace(old, new))
    assert expected in fails(capsys, "run", f"{name}.py")


def test_a_file_that_is_no_module_is_refused(tmp_path, capsys):
    for name in ("my-recipe.py", "notes.md"):
        (tmp_path / name).write_text("")
        line = fails(capsys, "run", str(tmp_path / name))
        assert "expected a Python file with a name of letters, digits and underscores" in line


def test_the_progress_tells_the_losses_of_runs_or_how_many_are_done(tmp_path):
    run = SimpleNamespace(
        console=Terminal(width=100), counts=None, losses=None, labels=["a 0", "b 0"], finished=1, done=0, total=2
    )
    bar, run.counts = _Bar(run), [1, 0]
    for losses, expected in (([0, 0], "1 of 2 runs"), ([0.5, 0.25], "training loss: a 0 0.50 · b 0 0.25")):
        run.losses = losses
        list(bar.get_renderables())
        assert bar.tasks[0].description == expected


def test_progress_names_a_run_by_what_differs_from_others():
    keys = [(0, "copy", "none"), (0, "copy", "tisa")]
    assert [name_key(key, keys) for key in keys] == ["none", "tisa"]
    assert name_key((1, "tisa"), [(0, "tisa"), (1, "tisa")]) == "seed 1"
    assert name_key((0, "tisa"), [(0, "tisa")]) == "tisa"
    assert name_key((), [()]) == ""


def test_figures_of_one_title_have_files_of_their_own(tmp_path):
    def paint(number):
        return lambda canvas: canvas.add_subplot().plot([0, number])

    report = Report("Which?", ["Both."], [Figure("Line a+b", paint(1)), Figure("Line a/b", paint(2))])
    files = {path.name: path.read_text() for path in report.write(tmp_path)}
    assert list(files) == ["report.html", "report.md", "line-a-b.svg", "1-line-a-b.svg"]
    assert files["line-a-b.svg"] != files["1-line-a-b.svg"]
    assert "![Line a/b](1-line-a-b.svg)" in files["report.md"]


def test_results_of_an_earlier_version_of_a_file_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(source, number):
        Path("own_recipe.py").write_text(source)
        Path("number_beside.py").write_text(f"NUMBER = {number}")
        for name in ("own_recipe", "number_beside"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        main(["run", "own_recipe.py"])
        return capsys.readouterr().out

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # or files of the same second would pass for the same
    with pytest.raises(NameError):
        run(OWN, "forgotten")
    assert "It is 7." in run(OWN, "7")
    assert "`whereformer run own_recipe.py`" in Path("out/report.md").read_text()
    for source, number in ((OWN, "8"), (OWN + "# changed", "7")):
        with pytest.raises(SystemExit):
            run(source, number)
        assert "out has results for a different version of the code; choose another folder" in capsys.readouterr().err


def test_the_version_of_code_has_packages_and_what_relative_imports_reach(tmp_path):
    files = {
        "main.py": "from package.below import X",
        "package/__init__.py": "",
        "package/below/__init__.py": "from ..beside import X",
        "package/beside.py": "from . import last",
        "package/last.py": "",
    }
    (tmp_path / "torch").mkdir()  # a folder beside it, named as something that is imported
    files["main.py"] += "\nimport torch"
    fingerprints = set()
    for changed in (None, *files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n# changed" * (name == changed))
        fingerprints.add(fingerprint_of_code(tmp_path / "main.py"))
    assert len(fingerprints) == 1 + len(files)


def test_a_template_in_a_package_is_no_error(tmp_path):
    (tmp_path / "main.py").write_text("import package")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "template.py").write_text("print '{name}'")
    before = fingerprint_of_code(tmp_path / "main.py")
    (tmp_path / "package" / "template.py").write_text("print '{other}'")
    assert fingerprint_of_code(tmp_path / "main.py") != before


@pytest.mark.parametrize("name", ["help", "quiet"])
def test_what_every_recipe_has_is_no_option(name):
    with pytest.raises(InputError, match=f"^{name}: an option of Own needs another name"):
        type("Own", (Toy,), {"__annotations__": {name: str}, name: ""})


def test_versions_of_plugins_are_those_of_contents(tmp_path, monkeypatch):
    monkeypatch.setattr("whereformer.lab.methods.load_plugin", lambda plugin: None)
    for name in ("a.py", "z.py"):
        (tmp_path / name).write_text("import beside")
    (tmp_path / "beside.py").write_text("")
    toy(out=tmp_path / "out", seeds=1)
    for name in ("a.py", "z.py"):
        toy(out=tmp_path / "out", seeds=1, plugin=tmp_path / name)
    (tmp_path / "beside.py").write_text("# changed")
    with pytest.raises(InputError, match="has results for a different version of the plugin; choose another folder"):
        toy(out=tmp_path / "out", seeds=1, plugin=tmp_path / "a.py")


def help_of(capsys, *words):
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"size": 3.5}, "size: expected an integer, got 3.5"),
        ({"size": True}, "size: expected an integer, got True"),
        ({"size": 0}, "size: expected at least 1, got 0"),
        ({"size": 2**20 + 1}, "size: expected at most 1048576, got 1048577"),
        ({"rates": "0.5,2"}, "rates: expected 0 to 1, got 2.0"),
        ({"rates": "x"}, "rates: expected a number, got 'x'"),
        ({"words": 3}, "words: expected text, got 3"),
        ({"words": ","}, "words: expected at least one, got none"),
        ({"path": 3}, "path: expected text, got 3"),
        ({"device": "tpu"}, "device: expected one of auto, cpu, cuda, got 'tpu'"),
        ({"device": np.array(["cpu", "cuda"])}, "device: expected one of auto, cpu, cuda, got ['cpu', 'cuda']"),
        ({"size": np.array([3, 4])}, "size: expected an integer, got [3, 4]"),
        ({"size": np.bool_(True)}, "size: expected an integer, got True"),
    ],
)
def test_a_bad_option_is_named(options, expected):
    with pytest.raises(InputError) as error:
        toy(**options, quiet=True)
    assert expected in str(error.value)


def test_options_are_given_by_name():
    for arguments, options in ((["folder"], {}), ([], {"sizes": 3})):
        with pytest.raises(TypeError):
            toy(*arguments, **options)


def test_text_lists_and_whole_numbers_stand_for_an_option():
    recipe = Toy(out="a", words="x, y,x", rates=[1, 0.25], path=Path("b"))
    assert (recipe.out, recipe.words, recipe.rates, recipe.path) == (Path("a"), ("x", "y"), (1.0, 0.25), "b")
    assert recipe.recorded_options() == {"size": 3, "words": ["x", "y"], "rates": [1.0, 0.25], "path": "b", "files": []}
    assert Toy(out="a", files=["x", "y"]).recorded_options()["files"] == ["x", "y"]
    assert Toy(out="a", size=np.int64(2), rates=np.array([1.0, 0.25])) == Toy(out="a", size=2, rates=[1, 0.25])
    negative = Toy(**parse(Toy, ["--path=-a", "--words=-1,b", "--no-shuffle", "--out=a"], "toy"))
    assert (negative.path, negative.words, negative.shuffle) == ("-a", ("-1", "b"), False)


def test_a_quick_look_has_other_defaults(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("whereformer.lab.run.default_jobs", lambda device, has_small_models: 1)
    main(["run", TOY, "--quick"])
    assert list(values("runs/quick")) == ['["draw", 0]']
    main(["run", TOY, "--quick", "--seeds", "2", "--out", "out"])
    assert len(values("out")) == 2
    assert f"whereformer run {TOY} --quick --seeds 2 --out out" in Path("out/report.html").read_text()


def test_what_a_folder_has_is_not_done_again(tmp_path, capsys):
    first = toy(out=tmp_path, seeds=1, jobs=1)
    both = toy(out=str(tmp_path), seeds=2, jobs=1)
    assert both.values[0,] == first.values[0,]
    assert "1 of 2 runs are already done; continuing with the others" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"has results with size 3, not 4; choose another folder, or"):
        toy(out=tmp_path, size=4)
    with ranks.open_folder(tmp_path), pytest.raises(InputError, match="another command is writing"):
        toy(out=tmp_path)
    assert toy(out=tmp_path, jobs=1).values[0,] == first.values[0,]


@pytest.mark.parametrize("change", ["cut", "edited", "line lost", "emptied", "strange", "of no call", "the first"])
def test_a_damaged_record_is_done_again(change, tmp_path, capsys):
    toy(out=tmp_path, jobs=1)
    path, before = tmp_path / "records.jsonl", numbers(tmp_path)
    first, *lines = path.read_bytes().splitlines(keepends=True)
    changed = {
        "cut": lines[1][:-9] + b"\n",
        "edited": re.sub(rb'"number": (-?\d)', rb'"number": 7', lines[1]),
        "line lost": b"",
        "emptied": b"\n",
        "strange": b"[" * 5000 + b"\n",
        "of no call": dump_with_hash({"key": "7", "value": 1}).encode(),
        "the first": first,
    }
    assert changed[change] != lines[1]
    path.write_bytes(first + lines[0] + changed[change] + lines[2])
    toy(out=tmp_path, jobs=1)
    message = f"line 3 of {path} is damaged and removed; its result will be computed again"
    assert (message in capsys.readouterr().out) == (change != "line lost")
    assert numbers(tmp_path) == before


def test_a_damaged_first_line_loses_no_record(tmp_path):
    toy(out=tmp_path, jobs=1)
    path = tmp_path / "records.jsonl"
    content = path.read_bytes()
    for damaged, message in (
        (bytes([content[0] ^ 1]) + content[1:], f"the first line of {path} is damaged"),
        (b"my own notes\n", f"{path} is not the record of a run"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=f"{message}; move it away or choose another folder"):
            toy(out=tmp_path)
        assert path.read_bytes() == damaged


def become(version, monkeypatch):
    """Run as another version of the package."""
    monkeypatch.setattr("whereformer.provenance.__version__", version)
    versions.cache_clear()


@pytest.fixture
def older(tmp_path, monkeypatch):
    """A folder that version 0.0.1 wrote two of three results of."""
    become("0.0.1", monkeypatch)
    toy(out=tmp_path, seeds=2, jobs=1, quiet=True)
    become("9.9.9", monkeypatch)
    yield tmp_path
    monkeypatch.undo()
    versions.cache_clear()


def by(folder):
    return [record["by"] for record in read_records(folder / "records.jsonl")[1].values()]


def test_results_of_another_version_are_done_again(older, capsys):
    before = values(older)
    toy(out=older, jobs=1)
    output = capsys.readouterr().out
    problem = "2 of 3 results are of whereformer 0.0.1, and this is 9.9.9"
    assert f"{problem}; they are computed again (to keep them, install that version)" in output
    assert "already done" not in output
    assert by(older) == [["9.9.9"]] * 3
    assert len((older / "records.jsonl").read_text().splitlines()) == 4  # none of the old ones is left
    assert values(older).keys() > before.keys()
    toy(out=older, jobs=1)
    assert "results are of" not in (output := capsys.readouterr().out)
    assert "3 of 3 runs are already done" in output


def test_an_interrupted_repetition_leaves_the_results_of_the_older_version(older):
    with pytest.raises(KeyboardInterrupt):
        toy(out=older, jobs=1, fails="interrupt", quiet=True)
    assert by(older) == [["9.9.9"], ["0.0.1"]]


def test_a_folder_without_versions_of_records_is_of_that_of_its_first_line(older, capsys):
    path = older / "records.jsonl"
    first, *lines = path.read_text().splitlines()
    records = [{n: part for n, part in json.loads(line).items() if n not in ("by", "check")} for line in lines]
    path.write_text(first + "\n" + "".join(map(dump_with_hash, records)))
    toy(out=older, jobs=1)
    assert "2 of 3 results are of whereformer 0.0.1, and this is 9.9.9" in capsys.readouterr().out


@pytest.mark.parametrize("forged", [7, [], [7], {}, "0.0.1"])
def test_forged_versions_are_damage(forged, older, capsys):
    path = older / "records.jsonl"
    first, line, _ = path.read_text().splitlines(keepends=True)
    record = {name: part for name, part in json.loads(line).items() if name != "check"}
    path.write_text(first + dump_with_hash({**record, "by": forged}))
    toy(out=older, jobs=1)
    assert f"line 2 of {path} is damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "make", "expected"),
    [
        ("report.html", Path.mkdir, "expected a file, got a folder: '.*/report.html'"),
        ("a-line.svg", Path.mkdir, "expected a file, got a folder: '.*/a-line.svg'"),
        ("report.md", os.mkfifo, "expected a file, got a pipe, socket or device: '.*/report.md'"),
        ("records.jsonl", Path.mkdir, "expected a file, got a folder: '.*/records.jsonl'"),
        ("records.jsonl", lambda path: path.symlink_to("nowhere"), "records.jsonl' is a link that leads nowhere"),
        ("made", Path.touch, "expected a folder or nothing, got a file: '.*/made'"),
        ("notes.txt", Path.mkdir, "expected a file, got a folder: '.*/notes.txt'"),
    ],
)
def test_where_nothing_can_be_written_is_refused_before_any_work(name, make, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(Toy, "draw", lambda *_: pytest.fail("it works"))
    monkeypatch.setattr(Toy, "outputs", ("made/", "notes.txt"))
    make(tmp_path / name)
    with pytest.raises(InputError, match=f"^out: .*{expected}"):
        toy(out=tmp_path, jobs=1, quiet=True)


def test_records_that_are_a_link_are_written_where_it_leads(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere.jsonl").touch()
    (tmp_path / "out" / "records.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    with pytest.raises(InputError, match="is not the record of a run"):
        toy(out=tmp_path / "out", jobs=1, quiet=True)
    toy(out=tmp_path / "first", jobs=1, quiet=True)
    (tmp_path / "first" / "records.jsonl").rename(tmp_path / "elsewhere.jsonl")
    toy(out=tmp_path / "out", jobs=1, seeds=4, quiet=True)
    assert (tmp_path / "out" / "records.jsonl").is_symlink()
    assert len(read_records(tmp_path / "elsewhere.jsonl")[1]) == 4


@pytest.mark.parametrize(("module", "extra", "kind"), [("jinja2", "train", ImportError), ("ray", "ray", InputError)])
def test_a_missing_module_is_told_before_any_work(module, extra, kind, tmp_path, monkeypatch):
    """Also one that only the report needs."""
    real = _extras.find_spec
    monkeypatch.setattr(_extras, "find_spec", lambda name: None if name == module else real(name))
    with pytest.raises(kind, match=rf"this needs {module}, which is not installed; .*\[{extra}\]"):
        toy(out=tmp_path / "out", jobs=1, ray="local", quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "value",
    [None, [], "x", {}, {"number": 1}]
    + [{"number": number, "threads": 1, "process": 1} for number in (None, "1", True, 1e301, math.nan, [1.0], {})]
    + [{"number": 1, "threads": 1.5, "process": 1}, {"number": 1, "threads": 1, "process": 1, "more": 1}],
)
def test_a_forged_record_is_done_again(value, tmp_path, capsys):
    toy(out=tmp_path, seeds=1, jobs=1)
    path, before = tmp_path / "records.jsonl", numbers(tmp_path)
    first, line = path.read_text().splitlines(keepends=True)
    record = {name: part for name, part in json.loads(line).items() if name != "check"}
    path.write_text(first + dump_with_hash({**record, "value": value}))
    toy(out=tmp_path, seeds=1, jobs=1)
    assert "repeating draw 0: its record has a value of another type" in capsys.readouterr().out
    assert numbers(tmp_path) == before


def test_processes_give_the_same_records(tmp_path, monkeypatch):
    one, two = (toy(out=tmp_path / str(jobs), jobs=jobs, quiet=True) for jobs in (1, 2))
    assert numbers(tmp_path / "1") == numbers(tmp_path / "2")
    assert list(one.values) == list(two.values)
    assert {result.process for result in one.values.values()} == {os.getpid()}
    assert os.getpid() not in {result.process for result in two.values.values()}
    assert {result.threads for result in two.values.values()} == {1}
    assert 1 <= default_jobs("cpu", has_small_models=True) <= 8
    assert default_jobs("cpu", has_small_models=False) == 1
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [default_jobs("cuda", has_small_models=small) for small in (True, False)] == [8, 2]


def test_a_process_that_dies_is_a_line(tmp_path):
    with pytest.raises(InputError, match="jobs: one of 2 processes ended unexpectedly"):
        toy(out=tmp_path, jobs=2, fails="kill", quiet=True)


def alive(pid):
    try:
        # A process that has ended but is not yet waited for is a zombie.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid):
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_ctrl_c_counts_while_processes_begin(tmp_path):
    """They import for seconds, in which they heed no signal."""
    words = [sys.executable, "-m", "whereformer", "run", TOY, "--out", str(tmp_path), "--jobs", "2", "--fails", "wait"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    # A shell that starts the tests in the background lets them ignore Ctrl-C.
    command = subprocess.Popen(words, **options, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    until = time.time() + 120
    while len(children_of(command.pid)) < 3 and time.time() < until:  # two, and one that keeps count of what they share
        time.sleep(0.01)
    time.sleep(0.2)
    children = children_of(command.pid)
    os.killpg(command.pid, signal.SIGINT)
    out, err = command.communicate(timeout=120)
    assert command.returncode == 130
    assert "stopping" in out
    assert err == "whereformer: interrupted; finished work is saved; run the same command to continue\n"
    assert not values(tmp_path)
    until = time.time() + 60
    while any(map(alive, children)) and time.time() < until:
        time.sleep(0.01)
    assert not any(map(alive, children))


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGKILL))],
)
def test_ctrl_c_and_kill_end_all_processes_and_keep_what_is_done(number, tmp_path):
    words = [sys.executable, "-m", "whereformer", "run", TOY, "--out", str(tmp_path), "--jobs", "2", "--fails", "wait"]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    path, until = tmp_path / "records.jsonl", time.time() + 120
    while (not path.exists() or path.read_bytes().count(b"\n") < 3) and time.time() < until:
        time.sleep(0.1)
    children = children_of(command.pid)
    assert len(children) >= 2
    command.send_signal(number)
    _, err = command.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert command.returncode == 130
        assert err == "whereformer: interrupted; finished work is saved; run the same command to continue\n"
    until = time.time() + 20
    while any(map(alive, children)) and time.time() < until:
        time.sleep(0.05)
    assert not any(map(alive, children))
    assert sorted(values(tmp_path)) == ['["draw", 0]', '["draw", 2]']
    toy(out=tmp_path, jobs=1, quiet=True)
    assert sorted(values(tmp_path)) == ['["draw", 0]', '["draw", 1]', '["draw", 2]']


def test_a_full_disk_is_a_line_and_what_is_recorded_is_kept(tmp_path, capsys):
    main(["run", TOY, "--out", str(tmp_path), "--jobs", "1", "--seeds", "1"])
    with largest_file((tmp_path / "records.jsonl").stat().st_size + 20):
        line = fails(capsys, "run", TOY, "--out", str(tmp_path), "--jobs", "1")
    assert line.startswith(f"whereformer: cannot write {tmp_path}")
    assert line.endswith("make room, then run the same command again")
    assert list(values(tmp_path)) == ['["draw", 0]']


def test_a_page_has_sentences_tables_figures_options_and_machine(tmp_path):
    report = toy(out=tmp_path, seeds=1, jobs=1, quiet=True)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page == report.page()
    Page(page).check_self_contained()
    Page(page).check_references()
    for text in (
        "Noise &lt;is&gt; noise.",
        '<h2 id="part-1">Noise</h2>',
        "It rises.",
        "var(--hue-0)",
        "words",
        "torch",
    ):
        assert text in page
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "![A line](a-line.svg)" in markdown
    svg = (tmp_path / "a-line.svg").read_text(encoding="utf-8")
    assert "#0072b2" in svg
    assert "#0000a0" not in svg
    assert json.loads((tmp_path / "records.jsonl").read_text().splitlines()[0])["machine"]["torch"]


def test_a_value_that_is_no_json_is_named(tmp_path):
    def worst(run, seed):
        return float("nan")

    with (
        Run(Toy(out=tmp_path), {}, quiet=True) as run,
        pytest.raises(TypeError, match=r'the value of \["worst", 3\] is not JSON'),
    ):
        run.map([(3,)], worst, task="worst", kind=float)
