"""Makes the search show excerpts of pages even when the site is opened from disk.

Sphinx's search fetches every page it finds, and browsers refuse to fetch files from disk. So the search page loads one
script with the text of all pages, which answers in place of the network.
"""

import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

SCRIPT = "excerpts.js"

ANSWER = """
const fetchFromNetwork = window.fetch;
window.fetch = (url, ...options) =>
  Object.hasOwn(PAGES, url) ? Promise.resolve(new Response(PAGES[url])) : fetchFromNetwork(url, ...options);
"""

WITHOUT_END = {"img", "br", "hr", "input", "meta", "link", "wbr", "source", "path"}


class Text(HTMLParser):
    """The text of a page's article. Of its elements, only those with an id remain, to which search results point."""

    def __init__(self, html):
        super().__init__()
        self.parts, self.open, self.skipped = [], [], 0
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        """Open an element; remember whether it is kept and whether its text is hidden."""
        if tag in WITHOUT_END:
            return
        given = dict(attributes)
        kept = ""
        if tag == "article" and given.get("role") == "main":
            kept = '<div role="main">'
        elif self.open and given.get("id") and tag in ("section", "dt", "span"):
            kept = f'<div id="{escape(given["id"])}">'
        if not (kept or self.open):
            return
        hidden = tag in ("script", "style", "svg") or "headerlink" in (given.get("class") or "")
        self.skipped += hidden
        self.parts.append(kept)
        self.open.append((tag, bool(kept), hidden))

    def handle_endtag(self, tag):
        """Close an element."""
        # A tag that is closed by the end of another one, such as <p>, is closed here, too.
        if not any(tag == opened for opened, _, _ in self.open):
            return
        while True:
            opened, kept, hidden = self.open.pop()
            self.skipped -= hidden
            self.parts.append("</div>" if kept else "")
            if opened == tag:
                break

    def handle_data(self, data):
        """Keep visible text of the article."""
        if self.open and not self.skipped:
            self.parts.append(escape(re.sub(r"\s+", " ", data), quote=False))


def _write(app, error):
    """Write the script after all pages."""
    if error or app.builder.format != "html":
        return
    site = Path(app.outdir)
    files = [f"{name}.html" for name in sorted(app.env.found_docs)]
    pages = {f"./{file}": "".join(Text((site / file).read_text(encoding="utf-8")).parts) for file in files}
    (site / "_static" / SCRIPT).write_text(f"const PAGES = {json.dumps(pages, indent=0)};\n{ANSWER}", encoding="utf-8")


def _load(app, pagename, templatename, context, doctree):
    """Load the script in the search page."""
    if pagename == "search":
        app.add_js_file(SCRIPT)


def setup(app):
    """Connect both steps."""
    app.connect("html-page-context", _load)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
