"""Follow every link of the built site, to files and anchors, and check that no page loads anything from elsewhere.

Run: python docs/check_links.py docs/_build/html
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse


class Page(HTMLParser):
    """A page's anchors, the targets of its links, and the files that it loads."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loaded = {"", "top"}, [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors.update(given[name] for name in ("id", "name") if given.get(name))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        # A stylesheet, an icon or a script is fetched with the page; "rel=next" and the like are not.
        if tag == "link" and {"stylesheet", "icon", "preload"} & set(given.get("rel", "").split()):
            self.loaded.append(given["href"])
        if tag in ("script", "img", "source", "iframe") and "src" in given:
            self.loaded.append(given["src"])


def problems(site):
    """One line for each link that leads nowhere, and for each file that is loaded from elsewhere."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        for target in page.loaded:
            if urlparse(target).netloc:
                yield f"{name}: loads {target} from elsewhere"
        for target in page.links + page.loaded:
            parts = urlparse(target)
            if parts.scheme or parts.netloc:
                continue
            file, anchor = urldefrag(target)
            found = (path.parent / unquote(file).partition("?")[0]).resolve() if file else path
            if found.is_dir():
                found /= "index.html"
            if not found.exists():
                yield f"{name}: {target} leads to no file"
            elif found in pages and unquote(anchor) not in pages[found].anchors:
                yield f"{name}: {target} leads to no anchor"


if __name__ == "__main__":
    site = Path(sys.argv[1]).resolve()
    found = list(problems(site))
    print("\n".join(found) or f"{sum(1 for _ in site.rglob('*.html'))} pages, every link leads somewhere")
    raise SystemExit(bool(found))
