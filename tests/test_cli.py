"""The command line's own help; what commands do is tested with their tasks."""

import pytest

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


@pytest.mark.parametrize("given", [[], ["nope"]])
def test_no_command_or_an_unknown_one_is_an_error_that_lists_them(given, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(given)
    assert stopped.value.code == 2
    assert "compare, bench" in capsys.readouterr().err
