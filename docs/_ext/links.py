"""Links from the site's pages to CONTRIBUTING.md and CHANGELOG.md, which lie outside its folder.

In a repository browser such a link leads to the file. On the site it leads to the page that includes the file.
"""

import re

ROOT_PAGE = re.compile(r"\]\((?:\.\./)+(CONTRIBUTING|CHANGELOG)\.md\b")


def _to_pages(app, docname, source):
    source[0] = ROOT_PAGE.sub(lambda found: f"](/{found[1].lower()}.md", source[0])


def setup(app):
    """Replace the links before a page is parsed."""
    app.connect("source-read", _to_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
