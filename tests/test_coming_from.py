"""What docs/guides/coming-from.md says, against the code of others: the same values and gradients."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from whereformer import OffsetBias, attention

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "coming-from.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the package is tested without its pages")


@pytest.fixture(scope="module")
def page():
    """The names that the page's Python defines."""
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        exec(block, names)
    return names


def content(batch, heads, n, width=8):
    return torch.randn(3, batch, heads, n, width, dtype=torch.float64, requires_grad=True)


def assert_same(actual, expected, *inputs):
    """The same output, and the same gradients of the inputs."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    ahead = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(output, inputs, ahead) for output in (actual, expected))
    assert min(gradient.abs().max() for gradient in theirs[:2]) > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sizes", [(7, 7), (3, 5), (1, 4), (2, 3, 4)])
def test_windows_have_swins_bias(sizes, page):
    """Swin's index, and Video Swin's of three axes, written from their papers: query minus key, row by row."""
    patches = page["grid"](*sizes)
    cells = list(itertools.product(*map(range, sizes)))
    index = torch.zeros(len(cells), len(cells), dtype=torch.int64)
    for i, j in itertools.product(range(len(cells)), repeat=2):
        for size, query, key in zip(sizes, cells[i], cells[j], strict=True):
            index[i, j] = index[i, j] * (2 * size - 1) + query - key + size - 1
    reach = patches[-1].item()
    table = torch.randn(2 * reach + 1, 3, dtype=torch.float64, requires_grad=True)
    inputs = content(2, 3, len(cells))
    bias = OffsetBias(table.T.flip(1), first=-reach)
    out = attention(*inputs, [bias], query_positions=patches, key_positions=patches)
    assert_same(out, sdpa(*inputs, attn_mask=table[index].permute(2, 0, 1)), inputs, table)


@pytest.mark.parametrize("name", ["Swin", "Beit"])
def test_images_have_the_bias_of_transformers(name, page):
    if name == "Swin":
        modeling = pytest.importorskip("transformers.models.swin.modeling_swin")
        if not hasattr(modeling, "SwinRelativePositionBias"):
            pytest.skip("this transformers has no module for the bias alone")
        module, arguments = modeling.SwinRelativePositionBias(4, (3, 5)).double(), ()
    else:
        modeling = pytest.importorskip("transformers.models.beit.modeling_beit")
        config = modeling.BeitConfig(image_size=12, patch_size=3, num_attention_heads=4)
        module, arguments = modeling.BeitRelativePositionBias(config).double(), ((4, 4),)
    sizes, table = module.window_size, module.relative_position_bias_table
    torch.nn.init.normal_(table)
    patches = page["grid"](*sizes)
    reach = patches[-1].item()
    queries = keys = patches
    if name == "Swin":
        bias = OffsetBias(table.T.flip(1), first=-reach)
    else:
        bias = OffsetBias(page["with_cls"](table), first=-reach - 1)
        queries, keys = page["positions_with_cls"](patches)
    inputs = content(2, 4, len(queries))
    out = attention(*inputs, [bias], query_positions=queries, key_positions=keys)
    assert_same(out, sdpa(*inputs, attn_mask=module(*arguments)), inputs, table)
