"""Check a port: which position method does other code compute, and what does it do otherwise?

Offsets of the wrong sign or off by one, another pairing in RoPE and transposed tables raise no error; they only make a
model worse. `identify` gives random queries and keys to the code and to methods with the same parameters. It reads each
method in all of these wrong ways, and says which reading gives the code's scores with the fewest errors.
"""

import copy
import itertools

import torch

import whereformer
from whereformer.positions.rope import LAYOUTS, Rope

TABLES = {
    "as it is": lambda table: table,
    "taken for its transpose": lambda table: table.reshape(table.mT.shape).mT.contiguous(),
    "transposed and taken for itself": lambda table: table.mT.reshape(table.shape),
    "reversed": lambda table: table.flip(-1),
}
LENGTH, TOLERANCE, MASKED = 12, 1e-4, -9_000


def parts_of(method, query, key, sign, shift):
    """Query . key as a method changes them, and what its terms add, (heads, n, n) each, with offsets read otherwise."""
    at = torch.arange(query.shape[2])
    site = whereformer.Site(sign * at, sign * (at + shift))  # an offset is key - query
    hidden = query.new_zeros(1, len(at), method.model.hidden_size)
    *inputs, terms = method.apply_hooks(hidden, query, key, key, site)

    def scores(terms):
        options = {"query_positions": site.query_positions, "key_positions": site.key_positions}
        _, lse = whereformer.attention(*inputs, terms, return_lse=True, backend="reference", **options)
        return (whereformer.attention_weights(*inputs, terms, **options).log() + lse.unsqueeze(-1))[0]

    content = scores(()) if method.uses_query_key else 0 * query[0] @ key[0].mT
    return content, scores(terms) - content


def readings_of(method):
    """Yield what is wrong with each way to read a method, and the method and the sign and shift of offsets read so."""
    layouts = [None] + [layout for part in method.components() if isinstance(part, Rope) for layout in LAYOUTS]
    tables = TABLES if any(parameter.dim() > 1 for parameter in method.parameters()) else ["as it is"]
    for table, layout, shift, sign in itertools.product(tables, layouts, (0, 1, -1, 2, -2), (1, -1)):
        read = copy.deepcopy(method).double().eval()
        errors = ["the sign of offsets is wrong"] if sign < 0 else []
        errors += [f"offsets are off by {shift:+d}"] if shift else []
        errors += [f"a table is {table}"] if table != "as it is" else []
        for part in read.components():
            if isinstance(part, Rope) and layout not in (None, part.layout):
                part.layout = layout
                errors.append(f"features are paired as {layout!r}")
        for parameter in read.parameters():
            if parameter.dim() > 1:
                parameter.data = TABLES[table](parameter.data)
        yield errors, read, sign, shift


@torch.no_grad()
def identify(scores, methods):
    """Say in a sentence which method computes the same scores before softmax, and what is wrong if none does exactly.

    Args:
        scores: a function of query and key (1, heads, n, head_dim), float64, that returns (1, heads, n, n). Scores
            that a mask sets to -10,000 or less are left out.
        methods: methods by name, with the parameters of the code and as many heads.
    """
    model = next(iter(methods.values())).model
    size = (2, 1, model.num_heads, LENGTH, model.head_dim)
    query, key = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = scores(query, key)[0]
    seen = found > MASKED
    best = None
    for name, method in methods.items():
        for errors, read, sign, shift in readings_of(method):
            try:
                parts = parts_of(read, query, key, sign, shift)
            except ValueError:  # positions that the method does not have
                continue
            there = {
                what: part[seen]
                for what, part in zip(("query . key", "what position adds"), parts, strict=True)
                if bool(part.abs().max() > 1e-9)
            }
            columns = torch.stack([*there.values()], -1)
            factors = torch.linalg.lstsq(columns, found[seen, None]).solution[:, 0]
            if (columns @ factors - found[seen]).abs().max() > TOLERANCE * found[seen].abs().max():
                continue
            wrong = [
                (what, factor) for what, factor in zip(there, factors.tolist(), strict=True) if abs(factor - 1) > 1e-3
            ]
            errors += [f"{what} is multiplied by {factor:.6g}" for what, factor in wrong]
            if best is None or len(errors) < len(best[1]):
                best = name, errors
    if best is None:
        return "no method explains these scores"
    name, errors = best
    return f"{name}, but {' and '.join(errors)}" if errors else f"these are the scores of {name}"


def turned(x):
    """RoPE as GPT-J has it: features 0 and 1 are a pair, then 2 and 3."""
    angles = torch.arange(x.shape[2])[:, None] * 10_000 ** (-torch.arange(4, dtype=x.dtype) / 4)
    one, other = x[..., ::2], x[..., 1::2]
    turned = one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()
    return torch.stack(turned, -1).flatten(-2)


if __name__ == "__main__":
    torch.manual_seed(0)
    names = ("none", "rope", "t5", "shaw")
    methods = {name: whereformer.build_position(name, hidden_size=16, num_heads=2) for name in names}
    distances = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    shaw = methods["shaw"]
    table, clip = shaw.keys[0].detach().double(), shaw.clip

    def shaws(query, key):
        """Shaw's scores, with keys one place further than they are."""
        rows = (distances + 1).clamp(-clip, clip) + clip
        return (query @ key.mT + torch.einsum("bhid,ijd->bhij", query, table[rows])) * 8**-0.5

    print("code without positions:", identify(lambda query, key: query @ key.mT * 8**-0.5, methods))
    print("code like GPT-J's:", identify(lambda query, key: turned(query) @ turned(key).mT, methods))
    print("code with Shaw's table:", identify(shaws, methods))
    print("code with random scores:", identify(lambda query, key: torch.randn(1, 2, LENGTH, LENGTH).double(), methods))
