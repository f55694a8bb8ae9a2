"""What the README says is true: its links lead to files, and its table lists the methods that there are."""

import re
from pathlib import Path

import pytest
import torch

import whereformer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "examples/README.md"])
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if "://" not in link and not (ROOT / page).parent.joinpath(link).exists()]
    assert not missing


def test_the_table_lists_every_method():
    table = README.split("## The methods")[1].split("Join them")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == whereformer.position_names()


def test_only_the_methods_that_extrapolate_say_so():

    table = README.split("## The methods")[1].split("Join them")[0]
    beyond = whereformer.Positions(0, 1, 9)
    for name, extrapolates in re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\| (yes|no) \|", table, re.MULTILINE):
        position = whereformer.build_position(name, hidden_size=8, num_heads=2, max_length=8)
        query, key, value = torch.randn(3, 1, 2, 9, 4)

        def use(position=position, query=query, key=key, value=value):
            hidden = position.embed(torch.randn(1, 9, 8), beyond)
            position.rotate(query, key, value, whereformer.Place(beyond, beyond))
            position.terms(hidden, whereformer.Place(beyond, beyond))

        if extrapolates == "yes":
            use()
        else:
            with pytest.raises(whereformer.PositionRangeError):
                use()
