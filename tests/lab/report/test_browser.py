"""Pages as people meet them: opened in Chromium, clicked, sorted, read on a phone, dark and light."""

import json
import re
import shutil
from base64 import b64decode
from dataclasses import replace
from io import BytesIO
from math import exp
from pathlib import Path
from unicodedata import normalize

import pytest

from tests.lab.report.kinds import REPORTS

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver (chromedriver) on the PATH"
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
SIZES = {"A4": (210, 297), "Letter": (216, 279)}  # millimeters
MARGIN = 12
NARROW, WIDE = 360, 1280


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with pytest.MonkeyPatch.context() as patch:
        # Selenium shall neither look for drivers nor tell anyone.
        patch.setenv("SE_OFFLINE", "true")
        patch.setenv("SE_AVOID_STATS", "true")
        browser = Chrome(options=options, service=Service(executable_path=DRIVER))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    facts = {"Options": {"text": "abc" * 60}, "Machine": {"processor": "one"}}
    for name, build in REPORTS.items():
        page = replace(build(), command="whereformer again", facts=facts).page()
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in REPORTS}


# All pages have the same code; what one alone has is asked of it by tests of its own.
@pytest.fixture(
    params=[pytest.param(name, marks=[] if name in ("analyze", "compare") else pytest.mark.slow) for name in REPORTS]
)
def page(request, browser, files):
    """The browser with one of the pages open; nothing may have been logged when the test is over."""
    show(browser, WIDE)
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(files[request.param])
    browser.page = request.param
    yield browser
    assert browser.get_log("browser") == []


def show(browser, width, *, dark=False, height=900, media=""):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme], "media": media})


def press(browser, *keys):
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def select(browser, css):
    from selenium.webdriver.common.by import By

    return browser.find_elements(By.CSS_SELECTOR, css)


def test_loads_nothing_but_itself(page):
    requested = [
        entry["message"] for entry in page.get_log("performance") if "Network.requestWillBeSent" in entry["message"]
    ]
    assert requested
    assert not [message for message in requested if '"url":"http' in message]
    loaded = page.execute_script(
        "return [...document.querySelectorAll('[src], link, image, use')].map(e => e.src || e.getAttribute('href'))"
    )
    assert all(url.startswith(("data:", "#")) for url in loaded)


SORTED = """
const table = arguments[0].closest("table"), at = arguments[0].closest("th").cellIndex;
return [arguments[0].closest("th").getAttribute("aria-sort"),
        [...table.tBodies[0].rows].map((row) => row.cells[at]).map(
          (cell) => cell.dataset.order ?? cell.firstChild?.textContent ?? "")];
"""


def test_tables_sort_by_click_and_by_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    headers = [button for button in select(page, "thead th > button") if button.is_displayed()][:12]
    assert headers
    for button in headers:
        directions = []
        for do in (button.click, lambda: press(page, Keys.ENTER)):
            do()
            direction, values = page.execute_script(SORTED, button)
            directions.append(direction)
            numbers = [value for value in values if value != ""]
            assert values == numbers + [""] * (len(values) - len(numbers))  # what has no number stays last
            try:
                numbers = [float(number.replace(",", "").rstrip("%")) for number in numbers]
            except ValueError:
                # By the alphabet of people, in which case and punctuation count least.
                numbers = [number.lower() for number in numbers if number.isalnum()]
            assert numbers == sorted(numbers, reverse=direction == "descending")
        assert set(directions) == {"ascending", "descending"}


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_nothing_is_wider_than_the_page(page, width):
    show(page, width)
    page.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.execute_script(overflow) == 0


@pytest.mark.parametrize("width", [1100, WIDE])
def test_a_wide_ranking_shows_all_its_columns_on_a_desk(browser, files, width):
    show(browser, width)
    browser.get(files["compare-wide"])
    box = "const box = document.querySelector('table').parentElement; return [box.scrollWidth, box.clientWidth]"
    needed, available = browser.execute_script(box)
    assert 0 < needed <= available <= width


SHARES = """
return [...document.querySelector(".look div p").querySelectorAll("span")].map(
  (word) => parseFloat(word.style.getPropertyValue("--share")));
"""


def test_one_points_at_a_token_and_copies_a_command(browser, files):
    from selenium.webdriver.support.ui import WebDriverWait

    show(browser, WIDE)
    browser.get(files["analyze"])
    (look,) = select(browser, ".look")
    _, scores = json.loads(look.get_attribute("data-look"))["heads"][0]
    for button, row in zip(select(browser, ".look button"), scores, strict=True):
        button.click()
        weights = [exp(score) for score in row]
        expected = [60 * weight / sum(weights) for weight in weights]
        assert browser.execute_script(SHARES) == pytest.approx(expected, abs=0.01)
    assert [line.text for line in select(browser, ".command code")] == ["whereformer again"]
    (copy,) = select(browser, ".command button")
    copy.click()
    WebDriverWait(browser, 60).until(lambda _: copy.text in ("Copied", "Selected"))


def test_without_scripts_the_picture_stands_and_nothing_is_dead(browser, files):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(files["analyze"])
        assert [part.is_displayed() for part in select(browser, ".look")] == [False]
        assert not select(browser, "button")
        assert all(part.is_displayed() for part in select(browser, "figure svg"))
        assert [part.text for part in select(browser, "pre")] == ["whereformer again"]
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_on_a_phone_a_table_that_is_cut_says_so(browser, files):
    show(browser, NARROW)
    browser.get(files["compare-wide"])
    table, *_ = select(browser, ".scroll + .more")
    assert table.is_displayed()
    browser.get(files["probe"])  # rows of texts are lists there
    assert [head.is_displayed() for head in select(browser, ".texts thead")] == [False]
    show(browser, WIDE)
    browser.get(files["compare"])
    assert not any(part.is_displayed() for part in select(browser, ".scroll + .more"))


CELLS = "return [...document.querySelectorAll('td, th, figure text, code')].map((part) => part.textContent)"
ENDS = """
return [...document.querySelectorAll("td, th, figure svg, pre")].map((part) => {
  const box = part.getBoundingClientRect();
  return [box.left, box.right, box.height > 0, part.textContent];
});
"""


# Letter is the wider paper: a page that fits on A4 needs no less there.
@pytest.mark.parametrize("paper", ["A4", pytest.param("Letter", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", REPORTS)
def test_print_loses_no_column_and_no_digit(browser, files, kind, paper):
    pypdf = pytest.importorskip("pypdf")
    width, height = SIZES[paper]
    inside = (width - 2 * MARGIN) / 25.4 * 96
    show(browser, int(inside), media="print", dark=True)
    browser.get(files[kind])
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    ends = browser.execute_script(ENDS)
    assert [text for left, right, high, text in ends if left < 0 or right > inside or not high] == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= inside
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    show(browser, WIDE)
    parts = browser.execute_script(CELLS)
    options = {"paperWidth": width / 25.4, "paperHeight": height / 25.4, "preferCSSPageSize": True}
    printed = b64decode(browser.execute_cdp_cmd("Page.printToPDF", options)["data"])
    pages = pypdf.PdfReader(BytesIO(printed)).pages
    text, *parts = (
        re.sub(r"\s", "", normalize("NFKC", part)) for part in ("".join(page.extract_text() for page in pages), *parts)
    )
    assert [part for part in parts if part not in text] == []
    numbers = [number for part in parts for number in re.findall(r"[\d.,]+", part)]
    assert len(re.findall(r"\d", text)) >= sum(len(re.findall(r"\d", number)) for number in numbers)
    assert "There is more to the right" not in text


CONTRASTS = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const ground = (element) => {
  for (; element; element = element.parentElement) {
    const color = rgb(getComputedStyle(element).backgroundColor);
    if (color.length === 3 || color[3] === 1) return color;
  }
  return [255, 255, 255];
};
const found = {};
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || !element.checkVisibility() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
  const style = getComputedStyle(element);
  const color = element.tagName === "text" ? style.fill : style.color;
  const [a, b] = [light(rgb(color)), light(ground(element))];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const what = element.tagName + "." + (element.className.baseVal ?? element.className);
  found[what] = Math.min(found[what] ?? 99, contrast);
}
return found;
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_dark_and_light(page, dark):
    show(page, WIDE, dark=dark)
    page.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
    contrasts = page.execute_script(CONTRASTS)
    assert len(contrasts) > 10
    # WCAG 2's level AA.
    assert {what: contrast for what, contrast in contrasts.items() if contrast < 4.5} == {}
    ground = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (int(ground.split("(")[1].split(",")[0]) < 128) == dark


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_of_the_site_fit_a_phone_without_scripts(browser, dark):
    if not (pages := sorted((Path(__file__).parents[3] / "docs/_build/html").rglob("*.html"))):
        pytest.skip("the site is not built")
    show(browser, 380, dark=dark)
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        for page in pages:
            browser.get(page.as_uri())
            assert browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]["width"] <= 380, page
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.slow
def test_the_table_of_models_can_be_searched_and_filtered(browser):
    page = Path(__file__).parents[3] / "docs/_build/html/guides/attached-models.html"
    if not page.exists():
        pytest.skip("the site is not built")
    show(browser, WIDE)
    browser.get(page.as_uri())

    def rows():
        cells = [
            row.text.split(maxsplit=2)[:2] for row in select(browser, ".filterable tbody tr") if row.is_displayed()
        ]
        return dict(cells)

    (search,), (outcome,), (count,) = (select(browser, f".filter {tag}") for tag in ("input", "select", "output"))
    total = len(select(browser, ".filterable tbody tr"))
    assert count.text == f"{total} of {total}"
    search.send_keys("Llava NEXT")
    assert rows() == {"LlavaNextConfig": "served", "LlavaNextVideoConfig": "served"}
    assert count.text == f"2 of {total}"
    outcome.send_keys("refused")
    assert rows() == {}
    search.clear()
    search.send_keys("clipv")
    assert rows()
    assert set(rows().values()) == {"refused"}
