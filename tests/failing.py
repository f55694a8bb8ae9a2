"""Helpers for tests of commands that refuse their arguments."""

import shlex

import pytest

from whereformer.cli.main import main


def fails(capsys, *arguments):
    """The one line that a command prints before it exits with 2."""
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


def refusals(table):
    """Pairs of a list of arguments and a message, to parametrize a test with, from lines ``arguments => message``."""
    pairs = [line.strip().partition(" => ") for line in table.strip().splitlines()]
    assert all(message for _, _, message in pairs), pairs
    return [(shlex.split(arguments), message) for arguments, _, message in pairs]
