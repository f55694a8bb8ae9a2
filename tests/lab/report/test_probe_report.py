"""The page of probes, from results that are made up."""

import dataclasses
from html.parser import HTMLParser

from tests.studies.test_probe_judgment import CANNOT, results_of, run
from whereformer.studies.probe.report import build_report
from whereformer.studies.probe.results import Failed

ODD_NAME = 'my<b>&"own"'
MACHINE = {"cpu": "a processor", "threads": 2, "torch": "2"}


class Cells(HTMLParser):
    """The text of every cell of a page's tables."""

    def __init__(self, page):
        super().__init__()
        self.cells, self.inside = [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag in ("td", "th"):
            self.cells.append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.cells[-1] += data


def made_up():
    found = results_of(
        copy={"none": [run(0.2), run(0.2)], "learned": [run(1.0, CANNOT)] * 2, "tisa": [run(1.0), run(0.21)]},
        passkey={ODD_NAME: [run(0.5), run(0.75)], "none": [run(1.0, 1.0), Failed("it <broke>")]},
    )
    return dataclasses.replace(found, machine=MACHINE)


def page_of(results):
    return build_report(results)


def test_every_accuracy_has_its_mark_and_color():
    page = page_of(made_up())
    cells = [cell.strip() for cell in Cells(page).cells]
    at = cells.index("guessing")
    assert cells[at : at + 4] == ["guessing", "20.0%", "20.0%", ""]
    assert cells[at + 4 : at + 8] == ["none", "(20.0%)", "failed", "0/2"]
    assert cells[at + 8 : at + 12] == ["learned", "100.0%*", "not tried", "1/2"]
    assert cells[at + 12 : at + 16] == ["tisa", "60.5%?21%\N{EN DASH}100%", "not tried", "0/2"]
    assert cells[at + 16 : at + 20] == [ODD_NAME, "not tried", "62.5%50%\N{EN DASH}75%", "0/2"]
    longer = cells[at + 20 :]
    assert "cannot" in longer
    assert page.count("background: #fee838; color: #000") == 1  # 100%, the brightest
    assert page == page_of(made_up())


def test_names_and_reasons_are_escaped():
    page = page_of(made_up())
    assert "my<b>" not in page
    assert "my&lt;b&gt;&amp;&#34;own&#34;" in page
    assert 'title="with seed 1, it &lt;broke&gt;"' in page


def test_the_command_repeats_everything():
    page = page_of(made_up())
    assert "whereformer probe --positions " in page
    assert "--tasks copy,passkey --steps 10 --seeds 2" in page


def test_the_tasks_are_explained():
    page = page_of(made_up())
    assert "d a c b _ _ _ _" in page
    assert "content only" in page
