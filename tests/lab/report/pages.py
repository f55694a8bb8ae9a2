"""Reading pages in tests."""

import re
from html.parser import HTMLParser

from whereformer.lab.report.report import DOCS

VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}


class Page(HTMLParser):
    """Checks that tags are balanced, and keeps what the tests ask for."""

    def __init__(self, text):
        super().__init__()
        self.text = text
        self.open, self.ids, self.links, self.tags = [], [], [], []
        self.cells = []  # the tables' bodies: a list of texts a row
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self._append_record(tag, dict(attrs))

    def handle_startendtag(self, tag, attrs):
        self._append_record(tag, dict(attrs))

    def _append_record(self, tag, attributes):
        self.tags.append((tag, attributes))
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes[name] for name in ("src", "href", "xlink:href") if name in attributes]
        if "tbody" in self.open:
            if tag == "tr":
                self.cells.append([])
            elif tag in ("td", "th"):
                self.cells[-1].append("")

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "tbody" in self.open and {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data.strip()

    def check_self_contained(self):
        """Nothing is loaded from elsewhere."""
        assert self.links
        followed = [a["href"] for tag, a in self.tags if tag == "a"]  # by a click
        assert all(link.startswith(DOCS) or re.fullmatch(r"[\w-]+\.csv", link) for link in followed)
        assert all(link.startswith(("#", "data:")) for link in self.links if link not in followed)
        assert not re.search(r"@import|url\((?!#)", self.text)
        assert "http" not in re.sub(rf'href="{DOCS}|http-equiv|xmlns="http://www\.w3\.org/2000/svg"', "", self.text)

    def check_references(self):
        """Ids are unique, and every reference leads somewhere."""
        assert len(set(self.ids)) == len(self.ids)
        labels = [attributes.get("aria-labelledby") for _, attributes in self.tags]
        targets = {link[1:] for link in self.links if link.startswith("#")} | {label for label in labels if label}
        targets |= set(re.findall(r"url\(#([^)]+)\)", self.text))
        assert targets <= set(self.ids)
