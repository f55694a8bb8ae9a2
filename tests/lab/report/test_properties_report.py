"""The page and the Markdown of Table 1, from results that are made up here."""

import re
from html.parser import HTMLParser

from tests.studies.test_properties_ticks import data_of, judged, losses_of
from whereformer.studies.properties import report

ODD_NAME = 'my<b>&"own"'


def results_of(position="tisa", *arguments, **changed):
    return judged(data_of(position, *arguments, **changed))[0]


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


def test_every_tick_stands_above_its_number():
    page = results_of().report()
    cells = [cell.strip() for cell in Cells(page).cells]
    at = cells.index("tisa")
    assert cells[at + 1 : at + 7] == [
        "yes+0.05",
        "yes90/100",
        "yes2.2k",
        "yes1e-13",
        "yes12, 12",
        "yes100%",
    ]
    assert "All 6 properties, measured: tisa" in page
    assert "the paper says" not in page.split("<section")[2]
    times = cells[cells.index("256 tokens") + 1 :]
    assert times[:3] == ["tisa", "2.0", "3.0"]


def test_what_the_paper_says_otherwise_is_marked_and_explained():
    results = results_of("shaw")
    page, markdown = results.report(), report.build_markdown(results)
    for text in (page, markdown):
        assert "Where Table 1 of the TISA paper says otherwise" in text
        assert "shaw, parallelizable: yes (12, 12), but the paper says no; as a table over offsets" in text
    assert "| yes* (12, 12) |" in markdown


def test_what_is_open_says_why():
    results = results_of("tisa", losses_of(4.95, 4.97))
    assert "| open (+0.02) |" in report.build_markdown(results)
    assert "Undecided or impossible" in results.report()
    assert any("so it has little to lose" in sentence for sentence in results.sentences())


def test_names_are_text_and_nothing_is_loaded():
    page = results_of(ODD_NAME).report()
    assert ODD_NAME not in page
    assert "my&lt;b&gt;&amp;&#34;own&#34;" in page
    assert "<i>news</i>" not in page
    assert not re.search(r'(src|href)="(?!#|data:)', page)


def test_equal_results_give_equal_pages():
    assert results_of().report() == results_of().report()
