"""Damage to JSON files, for tests of what reads them."""

import copy

from hypothesis import strategies as st

STRANGE = [None, True, -1, 0, 2, 10**15, 1.5, -0.5, 1e99, "", "x", "\x1b[31m", [], {}, [[]], [None], {"x": 1}]
"""Values of every kind, to put in place of others."""
GONE = object()
"""In place of a value: it is deleted."""


def places(value, path=()):
    """Yield the path of everything in a JSON value; of a list only the first and the last."""
    yield path
    if isinstance(value, dict):
        for name, each in value.items():
            yield from places(each, (*path, name))
    if isinstance(value, list):
        for index in sorted({0, len(value) - 1}) if value else ():
            yield from places(value[index], (*path, index))


def damaged(content, path, by):
    """The same content with another value at a place."""
    if not path:
        return by
    content = copy.deepcopy(content)
    owner = content
    for step in path[:-1]:
        owner = owner[step]
    if by is GONE:
        del owner[path[-1]]
    else:
        owner[path[-1]] = by
    return content


def damages(content, values=STRANGE):
    """A strategy for damaged content: one or two places with strange values, or without theirs."""
    found = [path for path in places(content) if path]
    one = st.tuples(st.sampled_from(found), st.sampled_from([GONE, *values]))
    return one.map(lambda change: damaged(content, *change))
