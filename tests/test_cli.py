"""The command line's own help; what commands do is tested with their tasks."""

import os
from pathlib import Path

import pytest

from tests.failing import fails
from whereformer.cli.main import COMMANDS, main


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--help"])
    assert stopped.value.code == 0
    # As one line, without the frames.
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_the_list_of_commands_has_a_paragraph_of_each(capsys):
    text = help_of(capsys)
    for name in COMMANDS:
        assert f"• {name} " in text
    assert "What does an encoder cost? FLOPs, parameters and memory, counted without building it. • positions" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_all_of_itself(name, capsys):
    whole = " ".join((COMMANDS[name].__doc__ or "").split())
    assert whole.partition(" --")[0] in help_of(capsys, name)


@pytest.mark.parametrize("name", ["compare", "pretrain", "properties", "bench", "cost"])
@pytest.mark.parametrize("kind", ["a device", "a named pipe", "a symbolic link"])
def test_outputs_replace_no_devices_pipes_and_links(name, kind, tmp_path, capsys):
    out = tmp_path / "out"
    if kind == "a symbolic link":
        out.symlink_to(tmp_path)
    elif kind == "a named pipe":
        os.mkfifo(out)
    else:
        out = Path(os.devnull)
    expected = "a file" if name == "cost" else "a folder"
    message = fails(capsys, name, "--out", str(out))
    assert f"--out: expected {expected} or a new name, got {kind}: '{out}'" in message
    assert sorted(tmp_path.iterdir()) == ([] if kind == "a device" else [out])


@pytest.mark.parametrize("given", [[], ["nope"]])
def test_no_command_or_an_unknown_one_is_an_error_that_lists_them(given, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(given)
    assert stopped.value.code == 2
    assert "compare, bench" in capsys.readouterr().err
