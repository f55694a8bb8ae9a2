"""Plain words: names that say nothing and sentences that only their author can read are counted, and counts only fall.

``python -m tests.test_words`` lists where they stand in src, ``python -m tests.test_words docs`` in the pages.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

NAMES = {
    "each", "found", "own", "given", "kept", "told", "meant", "said", "got", "wanted", "asked", "made", "drawn",
    "taken", "tried", "met", "judged", "seen", "awaited", "placed", "here", "now", "there", "place", "places",
    "whole", "some", "every", "other", "others", "more", "nothing", "beside", "also", "most", "least", "at",
    "named",
}  # fmt: skip
"""Pronouns, adverbs and participles, which do not say what a variable holds."""

LIMITS = re.compile(r"_?(MOST|LEAST|FEWEST|FARTHEST|FURTHEST)")
"""Limits begin with MAX_ or MIN_."""

PHRASES = {
    r"\bno such\b": "not a, does not exist",
    r"\b(is|are|was|were|be) no\b": "is not a",
    r"\b(of|in|by|for|with|from|beside) (which|whose|whom)\b": "which, or two sentences",
    r"\b(Return|Yield) what\b": "the noun",
    r"\b[Ww]hat (is|are|it|they|a|an|the|its|their)\b": "the noun",
    r"\b(those|that) of\b": "repeat the noun",
    r"\b(told|tells?)\b": "say, show, print",
    r"\bof (its|their|our) own\b": "its own, separate",
    r"\balone\b": "only",
    r"\bbeside\b": "next to, besides",
    r"\bbut for\b|\ball but\b": "except",
    r"\banew\b": "again",
    r"\b(some|no|any)body\b": "name the actor",
    r"\b(so|as) many\b": "the number of",
    r"\bwhole (number|position|offset)s?\b": "integer",
    r"initialis": "initializ",
}
"""Phrases in docstrings and comments, each with a better way."""

PAGES = "README.md", "CONTRIBUTING.md", "docs/*.md", "docs/[agm]*/*.md"
"""All pages except results: the API, the architecture, the guides and the methods."""
MAX_NAMES = {"src": 2, "tests": 0, "benchmarks": 0}
MAX_PHRASES = {
    "src": {r"\b(those|that) of\b": 1},
    "benchmarks": {},
    "docs": {r"\b[Ww]hat (is|are|it|they|a|an|the|its|their)\b": 2, r"\b(told|tells?)\b": 2},
}


pytestmark = pytest.mark.skipif(not (ROOT / "src").exists(), reason="the source is not next to the tests")


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a module binds, with their lines: variables, parameters, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def poor_names(folder: str) -> Iterator[tuple[str, str]]:
    """Yield each poor name in a folder, and where it stands."""
    for path in python_files(folder):
        for name, line in bound_names(ast.parse(path.read_text(encoding="utf-8"))):
            if name.strip("_") in NAMES or LIMITS.match(name):
                yield name, f"{path.relative_to(ROOT)}:{line}"


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a Python file, or the lines of a page except its code, with their lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blocks = re.sub(r"(?ms)^```.*?^```", lambda code: "\n" * code[0].count("\n"), text)
        yield from enumerate(blocks.splitlines(), 1)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.search(r"(?:^|\s)# (.*)", line):
            yield number, match[1]


def poor_phrases(folder: str) -> Iterator[tuple[str, str]]:
    """Yield each phrase of ``PHRASES`` in a folder's docstrings and comments, or in the pages, and where it stands."""
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    for path in pages if folder == "docs" else python_files(folder):
        for line, text in prose(path):
            for pattern in PHRASES:
                for _ in re.finditer(pattern, text):
                    yield pattern, f"{path.relative_to(ROOT)}:{line}"


@pytest.mark.parametrize("folder", MAX_NAMES)
def test_names_say_what_they_hold(folder):
    names = [f"{name} ({where})" for name, where in poor_names(folder)]
    assert len(names) <= MAX_NAMES[folder], ", ".join(names[-20:])


@pytest.mark.parametrize("folder", MAX_PHRASES)
def test_sentences_are_plain(folder):
    counts = Counter(pattern for pattern, _ in poor_phrases(folder))
    risen = {pattern: count for pattern, count in counts.items() if count > MAX_PHRASES[folder].get(pattern, 0)}
    assert not risen, f"more than before; write instead: {[PHRASES[pattern] for pattern in risen]}"


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "src"
    for word, where in [*poor_names(folder), *poor_phrases(folder)]:
        print(f"{where}: {word}")
