"""What docs/guides/coming-from.md says, against the code of others: the same values and gradients."""

import itertools
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from whereformer import DenseBias, OffsetBias, attention

from .models.test_attach_patches import Largest

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "coming-from.md"
REAL = torch.arange(9) < torch.tensor([[9], [5]])
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the package is tested without its pages")


@pytest.fixture(scope="module")
def page():
    """The names that the page's Python defines; each section runs after the setup only."""
    setup, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    names = {}
    for section in sections:
        blocks = re.findall(r"^```python\n(.*?)^```", setup + section, re.DOTALL | re.MULTILINE)
        exec("\n".join(blocks), section_names := {})
        names |= section_names
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


def test_rows_of_an_alignment_share_a_pair_bias():
    """Its gradient is the sum over rows, and no tensor has a number for each row and pair."""
    rows, pair = torch.randn(3, 2, 5, 4, 40, 2).double(), torch.randn(2, 4, 40, 40).double()
    rows.requires_grad_(), pair.requires_grad_()
    with Largest() as largest:
        items = zip(rows.unbind(1), pair.split(1), strict=True)
        out = torch.stack([attention(*item, [DenseBias(bias)]) for item, bias in items])
        out.square().sum().backward()
    assert largest.entries <= pair.numel()
    gradients = rows.grad, pair.grad
    rows.grad = pair.grad = None
    expected = sdpa(*rows, attn_mask=pair[:, None])
    expected.square().sum().backward()
    torch.testing.assert_close((out, *gradients), (expected, rows.grad, pair.grad), rtol=1e-10, atol=1e-10)


def test_graphs_have_graphormers_bias():
    distances, real = torch.randint(6, (2, 9, 9)), REAL
    table, inputs = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), content(2, 4, 9)
    out = attention(*inputs, [DenseBias(table[distances].movedim(3, 1))], key_mask=real)
    expected = torch.zeros(2, 4, 9, 9, dtype=torch.float64)
    for distance in range(6):
        expected = expected + table[distance, :, None, None] * (distances == distance)[:, None]
    assert_same(out, sdpa(*inputs, attn_mask=expected.masked_fill(~real[:, None, None], -torch.inf)), inputs, table)


CONFORMERS = PAGE.parents[2] / "examples" / "conformers.py"


@pytest.fixture(scope="module")
def conformers():
    """The names of examples/conformers.py."""
    return runpy.run_path(str(CONFORMERS))


def paper(query, key, value, vectors, u, v, scale, visible):
    """Transformer-XL's scores, head by head and pair by pair: scale * ((q_i + u) . k_j + (q_i + v) . p_(i - j))."""
    n_q, n_k = query.shape[2], key.shape[2]
    offsets = torch.arange(n_k) - torch.arange(n_k - n_q, n_k)[:, None]
    relative = vectors[:, offsets + vectors.shape[1] // 2]  # (heads, n_q, n_k, head_dim)
    scores = torch.einsum("bhid,bhjd->bhij", query + u, key)
    scores = scale * (scores + torch.einsum("bhid,hijd->bhij", query + v, relative))
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    return (weights.nan_to_num(0.0) @ value).transpose(1, 2).flatten(2)


class Linears(torch.nn.Module):
    """The parameters of ESPnet's and NeMo's modules, by their names."""

    def __init__(self):
        super().__init__()
        self.h, self.d_k = 3, 4
        for name in ("linear_q", "linear_k", "linear_v", "linear_out", "linear_pos"):
            setattr(self, name, torch.nn.Linear(12, 12, bias=name != "linear_pos"))
        self.pos_bias_u, self.pos_bias_v = torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(3, 4))
        self.dropout = torch.nn.Dropout(0.5)

    def update_cache(self, key, value, query, cache):
        if cache is None:
            return key, value, query, None
        return torch.cat([cache, key], 1), torch.cat([cache, value], 1), query, query

    def expected(self, query, key, positions, visible):
        content = [project(x).unflatten(2, (3, 4)).transpose(1, 2) for project, x in self.projections(query, key)]
        vectors = self.linear_pos(positions)[0].unflatten(1, (3, 4)).transpose(0, 1)
        u, v = self.pos_bias_u[:, None], self.pos_bias_v[:, None]
        return self.linear_out(paper(*content, vectors, u, v, 4**-0.5, visible))

    def projections(self, query, key):
        return (self.linear_q, query), (self.linear_k, key), (self.linear_v, key)


class InProjection(torch.nn.Module):
    """The parameters of SpeechBrain's module, by their names; its scale is that of the whole width."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.scale, self.mask_pos_future, self.vbias = 3, 12**-0.5, False, None
        self.in_proj_weight = torch.nn.Parameter(torch.ones(36, 12))
        self.out_proj, self.linear_pos = torch.nn.Linear(12, 12), torch.nn.Linear(12, 12, bias=False)
        self.pos_bias_u, self.pos_bias_v = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(4, 3))
        self.dropout_att = torch.nn.Dropout(0.5)

    def expected(self, query, key, positions, visible):
        projected = (query @ self.in_proj_weight.T).view(2, -1, 3, 12).transpose(1, 2)  # query, key, value in each head
        vectors = self.linear_pos(positions)[0].unflatten(1, (3, 4)).transpose(0, 1)
        u, v = self.pos_bias_u.view(3, 1, 4), self.pos_bias_v.view(3, 1, 4)
        return self.out_proj(paper(*projected.split(4, -1), vectors, u, v, self.scale, visible))


CHUNKS = torch.arange(9) // 4 <= torch.arange(9)[:, None] // 4
"""Who sees whom where frames see earlier chunks, and their own."""


@pytest.mark.parametrize("hidden", ["nothing", "padding", "later chunks"])
@pytest.mark.parametrize("name", ["RelPositionMultiHeadedAttention", "RelPositionMultiHeadAttention", "RelPosMHAXL"])
def test_conformers_of_toolkits_compute_the_same(name, hidden, conformers):
    layer = type(name, (InProjection if name == "RelPosMHAXL" else Linears,), {})().double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, positions = (torch.randn(*size, 12, dtype=torch.float64, requires_grad=True) for size in ((2, 9), (1, 17)))
    pairs = {"nothing": torch.ones_like(CHUNKS), "padding": REAL[:, None], "later chunks": REAL[:, None] & CHUNKS}
    visible = pairs[hidden].expand(2, 9, 9)
    names = list(layer.state_dict())
    assert conformers["replace"](torch.nn.ModuleList([layer, torch.nn.Linear(2, 2)])) == 1
    assert list(layer.state_dict()) == names
    if name == "RelPosMHAXL":
        masks = {"padding": {"key_padding_mask": ~REAL}}.get(hidden, {"attn_mask": ~visible})
        out, _ = layer(x, x, x, positions, **masks)
    elif name == "RelPositionMultiHeadAttention":
        if hidden == "padding":
            visible = visible & REAL[:, :, None]  # as NeMo makes it: padding sees nothing
        out = layer(x, x, x, None if hidden == "nothing" else ~visible, positions)
    else:
        out = layer(x, x, x, positions, visible[:, :1] if hidden == "padding" else visible.int())
    assert_same(out, layer.expected(x, x, positions, visible), x, positions, *layer.parameters())


def test_conformers_stream_over_a_cache(conformers):
    """Chunk after chunk over the frames before it is the whole recording with later chunks hidden."""
    layer = type("RelPositionMultiHeadAttention", (Linears,), {})().double().eval()
    conformers["replace"](layer)
    x, positions = torch.randn(2, 9, 12, dtype=torch.float64), torch.randn(1, 17, 12, dtype=torch.float64)
    expected = layer.expected(x, x, positions, CHUNKS.expand(2, -1, -1))
    for start, stop in ((0, 4), (4, 8), (8, 9)):
        chunk, near = x[:, start:stop], positions[:, 9 - stop : 8 + stop]
        out, _ = layer(chunk, chunk, chunk, None, near, cache=x[:, :start])
        torch.testing.assert_close(out, expected[:, start:stop], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"^expected 2 \* 9 - 1 rows of positions for the keys, got 9$"):
        layer(x, x, x, None, positions[:, 8:])
