"""Commands that refuse what they are given."""

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
