"""What other programs were reported to get wrong, as values: long positions in bfloat16, and tokens at one position."""

import math

import pytest
import torch

from whereformer import DenseBias, Positions, Site, build_position

HEADS, WIDTH = 2, 16


def test_rope_in_bfloat16_rounds_no_position():
    """bfloat16 has no number between 2992 and 3008: angles have to be computed in more digits."""
    rope = build_position("rope", hidden_size=HEADS * WIDTH, num_heads=HEADS)
    positions = Positions(3000, 1, 5)
    rows = torch.randn(3, 1, HEADS, 5, WIDTH).bfloat16()
    site = Site(query_positions=positions, key_positions=positions)
    query, key, _ = rope.bfloat16().transform_qkv(*rows, site)
    angles = positions.values()[:, None].double() * 10_000 ** (-torch.arange(WIDTH // 2).double() / (WIDTH // 2))
    turns = torch.polar(torch.ones_like(angles), angles)
    for rotated, row in ((query, rows[0]), (key, rows[1])):
        expected = torch.complex(*row.double().chunk(2, -1)) * turns
        expected = torch.cat([expected.real, expected.imag], -1)
        assert rotated.dtype == torch.bfloat16
        torch.testing.assert_close(rotated.double(), expected, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("name", ["rope", "shaw", "t5", "tisa", "alibi", "transformer_xl"])
def test_siblings_share_a_position(name):
    """In a tree of guesses (speculative decoding), each path from the root is what it is as a text of its own."""
    options = {"reset_cls": False} if name == "transformer_xl" else {}
    method = build_position(name, hidden_size=HEADS * WIDTH, num_heads=HEADS, **options).double()
    parents = [None, 0, 1, 1, 2, 3]
    paths = []
    for token in range(6):
        path = [token]
        while (parent := parents[path[0]]) is not None:
            path.insert(0, parent)
        paths.append(path)
    depths = torch.tensor([len(path) - 1 for path in paths])
    sees = torch.full((6, 6), -math.inf, dtype=torch.float64)
    for token, path in enumerate(paths):
        sees[token, path] = 0.0
    hidden, content = torch.randn(1, 6, HEADS * WIDTH).double(), torch.randn(3, 1, HEADS, 6, WIDTH).double()

    def attend(tokens, positions, *terms):
        site = Site(query_positions=positions, key_positions=positions)
        return method.attend(hidden[:, tokens], *content[..., tokens, :], site, terms)

    tree = attend(list(range(6)), depths, DenseBias(sees[None, None]))
    for token, path in enumerate(paths):
        alone = attend(path, torch.arange(len(path)))
        torch.testing.assert_close(tree[:, :, token], alone[:, :, -1], rtol=1e-9, atol=1e-9)
