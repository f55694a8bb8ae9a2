"""Adds a built site to a folder that keeps the sites of all versions, and lists them on its start page.

Run: python docs/publish.py docs/_build/html FOLDER NAME

NAME is a tag, such as v1.2.0, or a branch. A tag goes to the folder of its minor version, 1.2: a fix replaces
what it fixes.
"""

import re
import shutil
import sys
from pathlib import Path

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>whereformer: versions of this site</title>
<style>body {{ font: 1.1rem/1.6 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem }}</style>
<h1>whereformer</h1>
<ul>
{items}
</ul>
</html>
"""


def folder_of(name: str) -> str:
    """Return the folder of a version's site: ``v1.2.0`` has ``1.2``, and a branch has its name."""
    tag = re.fullmatch(r"v(\d+\.\d+)\..*", name)
    return tag.group(1) if tag else name


def publish(site: Path, folder: Path, name: str) -> None:
    """Put the site in its place, and write the start page anew."""
    target = folder / folder_of(name)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(site, target)
    versions = [path.name for path in folder.iterdir() if re.fullmatch(r"\d+\.\d+", path.name)]
    versions.sort(key=lambda version: [int(part) for part in version.split(".")], reverse=True)
    links = [(version, f"Version {version}") for version in versions]
    if (folder / "main").is_dir():
        links.append(("main", "Development version"))
    items = "\n".join(f'<li><a href="{path}/index.html">{text}</a></li>' for path, text in links)
    (folder / "index.html").write_text(PAGE.format(items=items), encoding="utf-8")
    # GitHub Pages leaves out folders such as _static otherwise.
    (folder / ".nojekyll").touch()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    publish(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
