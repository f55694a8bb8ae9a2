"""Pages as people meet them: opened in Chromium, clicked, sorted, read on a phone, dark and light."""

import shutil
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.lab.report.findings import model_of
from tests.recipes import test_comparison_report as compare
from whereformer.recipes import probe
from whereformer.recipes.head_report import build_report

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver (chromedriver) on the PATH"
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
PAGES = {
    "analyze": lambda: build_report([model_of()]).page(),
    "several": lambda: build_report([model_of(f"m{i}", n=16, noise=0.5 + i) for i in range(3)]).page(),
    "compare": lambda: compare.report_of(seeds=2).page(),
    "compare-wide": lambda: compare.wide_report().page(),
}
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
    for name, build in PAGES.items():
        (folder / f"{name}.html").write_text(build(), encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in PAGES}


# All pages have the same code; what one alone has is asked of it by tests of its own.
@pytest.fixture(
    params=[pytest.param(name, marks=[] if name in ("analyze", "compare") else pytest.mark.slow) for name in PAGES]
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


def show(browser, width, *, dark=False, height=900):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


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
        [...table.tBodies[0].rows].map((row) => row.cells[at].dataset.order)];
"""


def test_tables_sort_by_click_and_by_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    headers = [button for button in select(page, "thead th > button") if button.is_displayed()]
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
                numbers = [float(number) for number in numbers]
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


def test_text_on_the_colors_of_accuracies_can_be_read(browser):
    cells = "".join(f'<td style="{probe.colors(number / 100)}">x</td>' for number in range(101))
    browser.get("data:text/html,<table>" + quote(cells.replace("<td", "<td class=x")))
    assert browser.execute_script(CONTRASTS)["TD.x"] >= 4.5


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
