"""Pages as people meet them: opened in Chromium, clicked, sorted, read on a phone, dark and light."""

import shutil
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.lab.report.findings import model_of
from tests.recipes import test_compare_report as compare
from whereformer.lab.report.findings import report_of
from whereformer.recipes import probe

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver (chromedriver) on the PATH"
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
PAGES = {
    "analyze": lambda: report_of([model_of()], []).page(),
    "several": lambda: report_of(
        [model_of(f"m{i}", n=16, step=i, score=1.0 - i, noise=0.5 + i) for i in range(3)], []
    ).page(),
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
    assert all(each.startswith(("data:", "#")) for each in loaded)


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


def shown(browser):
    """The id of the head that is open large, or None."""
    return browser.execute_script("return document.querySelector('dialog[open]')?.id")


def focused(browser):
    return browser.execute_script("return document.activeElement.getAttribute('href')")


def test_heads_open_large_and_give_the_focus_back(page):
    from selenium.webdriver.common.keys import Keys

    if page.page.startswith("compare"):
        pytest.skip("it has no heads")
    if page.page == "several":
        page.execute_script("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    panels = [link for link in select(page, ".head > a") if link.is_displayed()]
    first, second = (link.get_attribute("href").split("#")[1] for link in panels[:2])
    panels[0].click()
    assert shown(page) == first
    large = select(page, "dialog[open]")[0]
    assert large.size["width"] > 700
    assert large.size["height"] > 200
    press(page, Keys.ESCAPE)
    assert shown(page) is None
    assert focused(page) == f"#{first}"
    # By keyboard alone: on to the next head, which is then the one that has the focus.
    press(page, Keys.ENTER)
    assert shown(page) == first
    press(page, Keys.ARROW_LEFT)
    assert shown(page) == first
    press(page, Keys.ARROW_RIGHT)
    assert shown(page) == second
    press(page, Keys.ESCAPE)
    assert (shown(page), focused(page)) == (None, f"#{second}")
    # By mouse: the arrows, and close.
    panels[0].click()
    select(page, "dialog[open] [data-step='1']")[0].click()
    assert shown(page) == second
    select(page, "dialog[open] [data-close]")[0].click()
    assert shown(page) is None


def test_what_is_drawn_large_is_the_small_curve_again(page):
    if page.page.startswith("compare"):
        pytest.skip("it has no heads")
    if page.page == "several":
        page.execute_script("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    panel = next(link for link in select(page, ".head > a") if link.is_displayed())
    panel.click()
    widths = page.execute_script(
        "return [...document.querySelectorAll('dialog[open] use')].map((use) => use.getBBox().width)"
    )
    assert widths
    assert min(widths) > 0


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_nothing_is_wider_than_the_page(page, width):
    show(page, width)
    page.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.execute_script(overflow) == 0
    if page.page.startswith("compare"):
        return
    panel = select(page, ".head > a")[0]
    page.execute_script("arguments[0].click()", panel)
    inside = "const d = document.querySelector('dialog[open]'); return [d.scrollWidth - d.clientWidth, d.clientWidth]"
    wider, dialog = page.execute_script(inside)
    assert wider == 0
    assert dialog > 0.8 * min(width, 1100)


@pytest.mark.parametrize("width", [1100, WIDE])
def test_a_wide_ranking_shows_all_its_columns_on_a_desk(browser, files, width):
    show(browser, width)
    browser.get(files["compare-wide"])
    box = "const box = document.querySelector('.ranking').parentElement; return [box.scrollWidth, box.clientWidth]"
    needed, there = browser.execute_script(box)
    assert 0 < needed <= there <= width


@pytest.mark.parametrize("width", [NARROW, 390])
def test_cards_on_a_phone_are_in_two_columns_of_equal_width(browser, files, width):
    show(browser, width)
    browser.get(files["compare-wide"])
    # A name of the user's own, with no "/" or "+" at which it could wrap.
    browser.execute_script("document.querySelector('.cards tbody th').append('a_method_of_my_own_with_a_long_name')")
    cards = [card.rect for card in select(browser, ".cards tbody tr")]
    assert len(cards) == len(compare.LONG_NAMES)
    assert len({card["x"] for card in cards}) == 2
    assert len({card["width"] for card in cards}) == 1
    inside = "return [...document.querySelectorAll('.cards tbody tr')].every((e) => e.scrollWidth <= e.clientWidth)"
    assert browser.execute_script(inside)


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
    for panel in select(page, ".head > a")[:1]:
        page.execute_script("arguments[0].click()", panel)
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


def test_a_legend_hides_kinds_of_heads(browser, files):
    show(browser, WIDE)
    browser.get(files["analyze"])
    button = next(each for each in select(browser, ".legend button") if "previous token" in each.text)

    def visible():
        return sum(each.is_displayed() for each in select(browser, ".head:has(> a .name)"))

    assert visible() == 6
    button.click()
    assert visible() == 4
    button.click()
    assert visible() == 6


def test_fits_are_switched_on_and_off(browser, files):
    show(browser, WIDE)
    browser.get(files["analyze"])
    select(browser, ".head > a")[0].click()
    buttons = select(browser, "dialog[open] [data-group]")
    assert [button.get_attribute("aria-pressed") for button in buttons] == ["false"] * 4 + ["true"]
    buttons[0].click()
    drawn = (
        "return [...document.querySelectorAll('dialog[open] svg:not(.swatch) .other')].map((e) => !e.matches('.off'))"
    )
    assert browser.execute_script(drawn) == [True, False, False, False, True]


def test_an_address_leads_to_a_head(browser, files):
    show(browser, WIDE)
    browser.get("about:blank")
    browser.get(files["several"] + "#model-1-heads-0-2")
    assert shown(browser) == "model-1-heads-0-2"
    assert select(browser, "dialog[open]")[0].is_displayed()


def test_without_scripts_a_head_opens_by_its_address(browser, files):
    show(browser, WIDE)
    browser.get("about:blank")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(files["analyze"] + "#model-0-heads-0-1")
        document = browser.execute_cdp_cmd("DOM.getDocument", {})["root"]["nodeId"]
        node = browser.execute_cdp_cmd("DOM.querySelector", {"nodeId": document, "selector": "dialog:target"})
        box = browser.execute_cdp_cmd("DOM.getBoxModel", node)["model"]
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert box["width"] > 700
    assert box["height"] > 300
