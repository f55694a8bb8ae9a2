"""How commands end: in one line and with a code, whatever happens."""

import errno
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from whereformer.cli.main import execute, main
from whereformer.errors import InputError, fail, one_line, printable
from whereformer.lab.terminal import Terminal

ODD = "a\x1b]0;title\x07\nb\u202ec\udcff"


@dataclass(frozen=True)
class Failing:
    error: BaseException
    out: Path | None = None

    def run(self, console):
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("out", ODD), 2, r"--out: a\x1b]0;title\x07 b\u202ec\udcff"),
        (OSError("no such file"), 2, "no such file"),
        (MemoryError(), 2, "not enough memory for these sizes (MemoryError)"),
        (KeyboardInterrupt(), 130, "interrupted; finished work is saved; run the same command to continue"),
        (BrokenPipeError(), 141, None),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            2,
            "cannot write {out}: no space left on the disk; make room",
        ),
    ],
)
def test_an_error_is_one_line_and_a_code(error, code, line, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        execute(Failing(error, tmp_path))
    assert stopped.value.code == code
    err = capsys.readouterr().err
    assert err.count("\n") == (line is not None)
    assert err.startswith(f"whereformer: {line.format(out=tmp_path)}" if line else "")


def test_an_error_of_ours_shows_where_it_was_raised():
    with pytest.raises(KeyError):
        execute(Failing(KeyError("x")))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("can't start new thread"), ImportError("libtorch.so: failed to map segment from shared object")],
)
def test_no_room_for_threads_and_libraries_is_no_fault_of_ours(error, capsys):
    with pytest.raises(SystemExit) as stopped:
        execute(Failing(error))
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"whereformer: not enough memory for these sizes ({error})\n"


def test_python_without_docstrings_is_refused_in_one_line():
    command = [sys.executable, "-OO", "-m", "whereformer", "positions"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert process.stderr == "whereformer: transformers needs its docstrings, which python -OO removes; use python -O\n"


def test_text_of_strangers_is_escaped_wherever_it_is_printed(capsys):
    assert (
        printable("plain \N{GREEK SMALL LETTER ALPHA} [b]\N{IDEOGRAPHIC SPACE}")
        == "plain \N{GREEK SMALL LETTER ALPHA} [b]\N{IDEOGRAPHIC SPACE}"
    )
    assert printable(ODD) == r"a\x1b]0;title\x07\nb\u202ec\udcff"
    assert one_line("a\n  b" * 2000).count("\n") == 0
    assert fail(ODD) == 2
    console = Terminal(width=100)
    console.print(f"[/red] :warning: {ODD}")
    from rich.table import Table

    table = Table(title=ODD)
    table.add_column(ODD)
    table.add_row(ODD)
    console.print(table)
    captured = capsys.readouterr()
    assert "[/red] :warning: a\\x1b]0;title\\x07" in captured.out
    assert not {"\x1b", "\x07", "\u202e"} & {*captured.out, *captured.err}


def test_a_closed_output_is_quiet():
    read, write = os.pipe()
    os.close(read)
    code = "from whereformer.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "positions"], stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_terminal_without_unicode_gets_ascii(monkeypatch, capsys):
    shown = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
        main(["positions"])
        sys.stdout.flush()
        assert "tisa" in shown.getvalue().decode("ascii")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("module", ["whereformer._extras", "rich", "torch"])
def test_ctrl_c_during_an_import_ends_without_a_traceback(module, tmp_path):
    """The import sends itself the signal, at a moment that no clock decides."""
    code = f"""
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["whereformer", "probe"]
signal.signal(signal.SIGINT, signal.default_int_handler)
from whereformer.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 130, done.stderr
    assert done.stderr.startswith("whereformer: interrupted")
    assert done.stderr.count("\n") == 1
