"""Every example runs and prints what it is about; so do the cells of the notebook."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from whereformer.cli.main import main

EXAMPLES = Path(__file__).parent.parent / "examples"


def printed(name):
    """What a script prints, run as a reader runs it."""
    command = [sys.executable, "-W", "error", EXAMPLES / name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_script_is_tested_here_and_listed():
    scripts = {path.name for path in EXAMPLES.glob("*.*")} - {"README.md"}
    listed = set(re.findall(r"\]\((\w+\.\w+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert scripts == listed
    assert all(f'"{name}"' in Path(__file__).read_text(encoding="utf-8") for name in scripts)


@pytest.mark.slow
def test_kernels_teach_a_bert_order():
    shares = dict(re.findall(r"^(.*?) {2,}(\d+)%", printed("attach_to_bert.py"), re.MULTILINE))
    assert int(shares["TISA's kernels"]) > 80
    assert int(shares["no positions"]) < 50


@pytest.mark.slow
def test_a_method_of_ones_own():
    text = printed("own_method.py")
    assert "0.51 0.60 0.71 0.84 1.00 0.84 0.71 0.60 0.51" in text
    with_fading, without = (float(re.search(rf"{name}: (\S+)", text)[1]) for name in ("fading", "without positions"))
    assert with_fading < without - 0.3


@pytest.mark.slow
@pytest.mark.parametrize(("script", "count"), [("packed_rows.py", 3), ("cached_decoding.py", 5)])
def test_packed_rows_and_a_cache_change_nothing(script, count):
    differences = [float(number) for number in re.findall(r"by at most ([^\s,]+)", printed(script))]
    assert len(differences) == count
    assert max(differences) < 1e-5


@pytest.mark.slow
def test_an_encoder_reads_more():
    text = printed("longer_texts.py")
    assert float(re.search(r"by at most (\S+),", text)[1]) < 1e-6
    assert "states of shape (1, 128, 32)" in text


@pytest.mark.slow
def test_conformers_need_no_matrix():
    text = printed("conformers.py")
    assert float(re.search(r"differ from the formula by at most (\S+)", text)[1]) < 1e-5
    assert "the state dict has the same names: True" in text


@pytest.mark.slow
def test_a_head_looks_where_the_task_needs_it():
    centers = [float(number) for number in re.findall(r"at offset (\S+),", printed("read_a_head.py"))]
    assert len(centers) == 4
    assert any(abs(center + 2) < 0.5 for center in centers)


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        ("like_gpt_j", "rope, but features are paired as 'interleaved'"),
        ("with_shaws_table", "shaw, but offsets are off by +1"),
        ("without_positions", "this is none"),
        ("random", "no method explains these scores"),
        ("rotate", "FILE:FUNCTION: expected a function of query and key, or of query, key and value, got one of 1"),
    ],
)
def test_a_port_is_checked(function, answer, capsys):
    with suppress(SystemExit):
        main(["check", str(EXAMPLES / "check_a_port.py") + f":{function}"])
    assert answer in "".join(capsys.readouterr())


def test_methods_of_a_port_are_a_dict(tmp_path, capsys):
    (tmp_path / "port.py").write_text("METHODS = 3\ndef scores(query, key): return query @ key.mT\n")
    with pytest.raises(SystemExit):
        main(["check", f"{tmp_path}/port.py:scores"])
    assert "FILE:FUNCTION: expected METHODS to be position methods by name, got 3" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["tisa", "t5"])
def test_the_demo_finds_the_token_before(method, capsys):
    main(["demo", "--position", method])
    text = capsys.readouterr().out
    assert float(re.search(r"step 100  loss (\S+)", text)[1]) < 0.05
    assert "of its attention to offset -1: the token before" in text


def test_the_notebook(monkeypatch):
    pytest.importorskip("matplotlib").use("agg")
    notebook = json.loads((EXAMPLES / "curves.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    # Cells have been run, from the first to the last, and show what they say.
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"]) >= 4
    monkeypatch.setitem(os.environ, "MPLBACKEND", "agg")
    namespace = {}
    for cell in cells:
        exec("".join(cell["source"]), namespace)
    assert namespace["loss"].item() < 1.5
    namespace["plt"].close("all")
