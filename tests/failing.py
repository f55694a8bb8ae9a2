"""Helpers for tests of commands that refuse their arguments or cannot write."""

import shlex
from contextlib import contextmanager

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


@contextmanager
def largest_file(size):
    """Let this process write no file of more bytes."""
    resource = pytest.importorskip("resource", reason="this system has no limits on the size of files")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refusals(table):
    """Pairs of a list of arguments and a message, to parametrize a test with, from lines ``arguments => message``."""
    pairs = [line.strip().partition(" => ") for line in table.strip().splitlines()]
    assert all(message for _, _, message in pairs), pairs
    return [(shlex.split(arguments), message) for arguments, _, message in pairs]
