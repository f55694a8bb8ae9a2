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
