"""What the site's pages say is true: Python prints what they show, links lead somewhere, public names are listed."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import whereformer
import whereformer.analysis
import whereformer.models
import whereformer.positions

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = Path(whereformer.__file__).parent
ALL_PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
PAGES = [page for page in [ROOT / "README.md", *ALL_PAGES] if "\n```python\n" in page.read_text(encoding="utf-8")]


def extension(name):
    """A module of the site's own, which is not on the path."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "_ext" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MARKS = {
    # This page exports models, as tests of export do every day; the warnings are torch's own.
    "export.md": [pytest.mark.slow, pytest.mark.filterwarnings("ignore")],
    # The programs' own warnings.
    "other-programs.md": pytest.mark.filterwarnings("ignore"),
}
NEEDED = {"other-programs.md": ("sentence_transformers", "peft", "lightning", "ctranslate2")}
"""Modules that a page needs and that may be missing: they are in the extra "clients"."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=MARKS.get(page.name, ())) for page in PAGES],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_the_code_of_a_page_prints_what_is_below_it(page):
    for module in NEEDED.get(page.name, ()):
        pytest.importorskip(module, reason=f"{module} is not installed")
    text = page.read_text(encoding="utf-8")
    assert extension("outputs").page(text) == text, f"run python docs/_ext/outputs.py {page.relative_to(ROOT)}"


@pytest.mark.parametrize("name", [name for name in whereformer.position_names() if name != "none"])
def test_every_method_has_code_with_its_output(name):
    assert re.search(r"^```\n\n```text\n", (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_method_has_a_page():
    pages = {page.stem for page in (DOCS / "methods").glob("*.md")} - {"index", "support"}
    assert pages == set(whereformer.position_names()) - {"none"}


def test_the_page_of_a_method_leads_to_its_code_and_tests():
    for name in set(whereformer.position_names()) - {"none"}:
        source = (DOCS / "methods" / f"{name}.md").read_text().partition("## Source")[2]
        for link in (f"(../../src/whereformer/positions/{name}.py)", "(../../tests/positions/test_"):
            assert link in source, name


@pytest.mark.parametrize("page", ["README.md", "docs/methods/index.md"])
def test_the_tables_of_methods_are_up_to_date(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == extension("tables").updated(page), "run python docs/_ext/tables.py"


# torch.compile reads .grad of every tensor that it is given, whether it is a leaf or not.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# Torch's exporter warns of itself.
@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in whereformer.position_names()])
def test_what_a_method_can_do_is_up_to_date(name, monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "_ext")
    support = extension("support")
    page = support.PAGE.read_text(encoding="utf-8")
    assert "| " + " | ".join(support.row(name)) + " |" in page, "run python docs/_ext/support.py"


def test_the_page_of_what_methods_can_do_has_each_of_them():
    page = (DOCS / "methods" / "support.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[?`(\w+)`", page, re.MULTILINE) == whereformer.position_names()


def anchors(page):
    """The anchors of a page's headings, as repository browsers and the site make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_lead_somewhere_in_a_repository_browser_too(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    definition = re.compile(r"^\[(`[^`]+`)\]: (\S+)$", re.MULTILINE)
    definitions = dict(definition.findall(text))
    assert set(re.findall(r"\[(`[^`\]]+`)\](?!\()", definition.sub("", text))) == set(definitions)
    links = [*re.findall(r"\]\(([^)\s]+)\)", text), *definitions.values()]
    for link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target.is_relative_to(ROOT / "src" / "whereformer"):
            # The tests may run without the source tree, against the installed package.
            target = PACKAGE / target.relative_to(ROOT / "src" / "whereformer")
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_rows_of_tables_are_as_wide_as_their_headers(page):
    width = None
    for line in page.read_text(encoding="utf-8").splitlines():
        bars = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) if line.startswith("|") else None
        assert width is None or bars in (None, width), line
        width = bars


def test_the_page_of_debugging_lists_every_environment_variable():
    files = [*ROOT.glob("Makefile"), *PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    used = {name for file in files for name in re.findall(r"\bWHEREFORMER_[A-Z_]+", file.read_text(encoding="utf-8"))}
    page = (DOCS / "architecture" / "debugging.md").read_text(encoding="utf-8")
    assert used == set(re.findall(r"^\| `(WHEREFORMER_\w+)=", page, re.MULTILINE))


@pytest.mark.parametrize("page", [page for page in ALL_PAGES if page.parent.name == "api" and page.stem != "index"])
def test_a_page_of_the_reference_begins_with_an_example(page):
    assert re.match(r"# .*\n\n```python\n", page.read_text(encoding="utf-8"))


SEARCHES = [
    ("relative bias", "methods/t5"),
    ("own method", "guides/own-method"),
    ("how fast", "results/attention"),
    *(
        (word, f"methods/{method}")
        for word, methods in whereformer.positions._OTHER_NAMES.items()
        for method in re.findall(r"'(\w+)'", methods)
    ),
]
"""Words that people search for, and the page that a search has to find; names that an error understands among them."""


@pytest.mark.parametrize(("words", "page"), SEARCHES)
def test_a_search_finds_the_page(words, page):
    """Main entries of the index ("!") are the first results of a search."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    entries = [entry for line in re.findall(r"^```\{index\} (.*)$", text, re.MULTILINE) for entry in line.split(", ")]
    assert f"! {words}" in map(str.lower, entries)


def test_the_reference_lists_every_public_name():
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    listed = {name.rpartition(".")[2] for name in re.findall(r"auto\w+:: ([\w.]+)", text)}
    modules = whereformer, whereformer.positions, whereformer.models, whereformer.analysis
    assert {name for module in modules for name in module.__all__} - listed == set()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/compatibility.md"])
def test_versions_are_those_of_the_package(page):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / page).read_text(encoding="utf-8")
    torch = project["dependencies"][0].removeprefix("torch>=")
    python = project["requires-python"].removeprefix(">=")
    assert re.search(rf"PyTorch\W*{re.escape(torch)}\b", text)
    assert re.search(rf"Python\W*{re.escape(python)}\b", text)
    if "transformers (" in text:
        (transformers,) = re.findall(r"transformers>=([\d.]+)", " ".join(project["optional-dependencies"]["hf"]))
        assert f"{transformers} and newer" in text


def test_the_site_of_each_version_stays(tmp_path):
    spec = importlib.util.spec_from_file_location("publish", DOCS / "publish.py")
    publish = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(publish)
    site, pages = tmp_path / "site", tmp_path / "pages"
    site.mkdir()
    pages.mkdir()
    for name in ("v0.2.0", "v0.10.0", "main", "v0.10.1"):
        (site / "index.html").write_text(name)
        publish.publish(site, pages, name)
    texts = {path.parent.name: path.read_text() for path in pages.glob("*/index.html")}
    assert texts == {"0.2": "v0.2.0", "0.10": "v0.10.1", "main": "main"}
    links = re.findall(r'href="(.*?)/index.html"', (pages / "index.html").read_text())
    assert links == ["0.10", "0.2", "main"]
