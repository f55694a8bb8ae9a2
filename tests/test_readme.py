"""What the README says is true: its links lead to files, and its table lists the methods that there are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "examples/README.md"])
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if "://" not in link and not (ROOT / page).parent.joinpath(link).exists()]
    assert not missing


def test_the_first_screen_has_the_two_commands_that_set_up_everything():
    screen = README.split("\n## ")[0]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"^make ([\w-]+) ", screen, re.MULTILINE) == ["compare", "test"]
    assert {"compare", "test"} <= set(targets)
