"""Any method takes the place of any other in the model that a guide shows: order, padding and layers count."""

import dataclasses
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

import whereformer
from whereformer.errors import InputError
from whereformer.kernels.make_call import CallOptions, SiteOptions, make_call
from whereformer.positions.base import ACTS_ON
from whereformer.positions.testing import randomize_parameters

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
METHODS = whereformer.position_names()
WITHOUT_ORDER = {"none", "logn"}
"""Methods that do not tell one order of tokens from another."""


def blocks(page):
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def site_of(n, layer=0):
    positions = whereformer.Positions(0, 1, n)
    return whereformer.Site(positions, positions, layer)


@pytest.fixture
def random_parameters(monkeypatch):
    """Methods begin with random parameters, since some begin at zero."""
    build = whereformer.build_position

    def build_and_draw(*arguments, **options):
        position = build(*arguments, **options)
        randomize_parameters(position)
        return position

    monkeypatch.setattr(whereformer, "build_position", build_and_draw)


@pytest.fixture
def model(random_parameters):
    """The class that the guide shows, and its layers' class."""
    namespace = {"torch": torch, "whereformer": whereformer}
    (code,) = (block for block in blocks("docs/guides/own-model.md") if "class Model" in block)
    exec(code.partition("\nids = ")[0], namespace)
    return namespace["Model"]


@pytest.mark.parametrize("name", METHODS)
def test_a_guides_model_with_any_method(name, model):
    torch.manual_seed(0)
    built = model(name).double()
    ids, order = torch.randint(1, 1000, (2, 12)), torch.randperm(12)
    real = torch.ones(2, 12, dtype=torch.bool)
    output = built(ids, real)
    same = torch.allclose(output[:, order], built(ids[:, order], real))
    assert same == (name in WITHOUT_ORDER), "the order of tokens"
    real[:, 9:] = False
    first, second = built(ids, real), built(ids.where(real, ids.flip(0) + 1), real)
    torch.testing.assert_close(first[:, :9], second[:, :9], msg="padding")
    hidden = built.position.embed(built.words(ids), site_of(12).query_positions)
    first, second = (built.layers[0](hidden, built.position, site_of(12, layer)) for layer in (0, 1))
    sizes = [
        sum(p.numel() for p in whereformer.build_position(name, hidden_size=64, num_heads=4, num_layers=n).parameters())
        for n in (1, 2)
    ]
    assert torch.equal(first, second) == (sizes[0] == sizes[1]), "the layer"


def test_a_method_that_acts_on_embeddings_is_told_once_if_it_cannot():
    position = whereformer.build_position("learned+tisa", hidden_size=64, num_heads=4, num_layers=2)
    assert position.acts_on == {"embeddings", "scores"}
    hidden = torch.randn(1, 12, 64)
    inputs = hidden, *torch.randn(3, 1, 4, 12, 16)
    with pytest.warns(UserWarning, match=r"embed was never called.*position\.embed\(hidden, positions\)") as record:
        position.attend(*inputs, site_of(12))
    assert [warning.filename for warning in record] == [__file__]
    position.attend(*inputs, site_of(12, 1))
    embedded = whereformer.build_position("learned", hidden_size=64, num_heads=4)
    embedded.embed(hidden, site_of(12).query_positions)
    embedded.attend(*inputs, site_of(12))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_where_it_acts(name):
    position = whereformer.build_position(name, hidden_size=64, num_heads=4)
    expected = {"none": set(), "learned": {"embeddings"}, "sinusoidal": {"embeddings"}}
    assert position.acts_on == expected.get(name, position.acts_on - {"embeddings"})
    assert position.acts_in_attention() == (name not in expected)
    assert position.acts_on <= set(ACTS_ON)


def test_attend_refuses_what_belongs_to_the_site_and_layers_that_are_not_there():
    position = whereformer.build_position("tisa", hidden_size=64, num_heads=4)
    inputs = torch.randn(1, 12, 64), *torch.randn(3, 1, 4, 12, 16)
    with pytest.raises(TypeError, match="multiple values for keyword argument"):
        position.attend(*inputs, site_of(12), key_mask=torch.ones(1, 12, dtype=torch.bool))
    rope = whereformer.build_position("rope", hidden_size=64, num_heads=4)
    with pytest.raises(InputError, match="query: Rope acts on query and key: expected tensors, got None"):
        rope.attend(inputs[0], None, None, inputs[3], site_of(12))
    with pytest.raises(InputError, match=r"site\.layer: .* 1 layers, got layer 1.*num_layers"):
        position.attend(*inputs, site_of(12, 1))


def test_apply_hooks_checks_what_a_method_would_take_in_silence():
    inputs = torch.randn(1, 12, 64), *torch.randn(3, 1, 4, 12, 16)
    rope, fox, logn = (
        whereformer.build_position(name, hidden_size=64, num_heads=4) for name in ("rope", "fox", "logn")
    )
    for name, options in (("inkling", {}), ("synthesizer", {"variant": "dense"})):
        reads = whereformer.build_position(name, hidden_size=64, num_heads=4, **options)
        with pytest.raises(InputError, match=r"hidden: expected \(batch, n_q, hidden_size 64\), got \(1, 12, 32\)"):
            reads.attend(inputs[0][..., :32], *inputs[1:], site_of(12))
    with pytest.raises(InputError, match=r"query: the method was built for 4 heads of width 16, got \(1, 2, 12, 16\)"):
        rope.attend(inputs[0], *(tensor[:, :2] for tensor in inputs[1:]), site_of(12))
    message = r"site\.new_key_positions: Fox needs all keys, not only the new ones: cache keys before"
    with pytest.raises(InputError, match=message):
        fox.apply_hooks(*inputs, dataclasses.replace(site_of(12), new_key_positions=site_of(1).key_positions))
    message = "causal: the method was built to count keys on both sides; pass causal=True to build_position"
    with pytest.raises(InputError, match=message):
        logn.attend(*inputs, dataclasses.replace(site_of(12), causal=True))


@pytest.mark.parametrize("name", METHODS)
def test_keys_and_values_may_have_fewer_heads(name, random_parameters):
    position = whereformer.build_position(name, hidden_size=64, num_heads=4).double()
    words = torch.randn(2, 12, 64, dtype=torch.float64)
    hidden = position.embed(words, site_of(12).query_positions)
    query, key, value = torch.randn(3, 2, 4, 12, 16, dtype=torch.float64)
    few = [tensor[:, :2] for tensor in (key, value)]
    many = [tensor.repeat_interleave(2, 1) for tensor in few]
    actual, expected = (position.attend(hidden, query, *pair, site_of(12)) for pair in (few, many))
    torch.testing.assert_close(actual, expected)


def test_signatures_show_every_option():
    shown = set(inspect.signature(whereformer.attention).parameters)
    assert set(inspect.signature(whereformer.explain).parameters) == shown
    assert set(inspect.signature(whereformer.attention_weights).parameters) == shown - {"return_lse", "backend"}
    attend = set(inspect.signature(whereformer.positions.PositionMethod.attend).parameters)
    assert attend == (shown - SiteOptions.__optional_keys__) | {"self", "hidden", "site"}
    assert set(site_of(12).options(None)) == SiteOptions.__optional_keys__
    common = {"query", "key", "value", "terms", "return_lse"}
    assert shown == CallOptions.__optional_keys__ | common | {"backend"}
    assert set(inspect.signature(make_call).parameters) == CallOptions.__optional_keys__ | common | {"recorder"}


def page_values(section):
    """What the code of a section of the page "Coming from" leaves, after the code at the page's top."""
    text = (ROOT / "docs/guides/coming-from.md").read_text(encoding="utf-8")
    head, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    body = next(part for part in sections if part.startswith(section))
    values = {}
    for block in BLOCK.findall(head) + BLOCK.findall(body):
        exec(block, values)
    return values


def test_coming_from_flex_attention():
    values = page_values("FlexAttention")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = flex_attention(values["query"], values["key"], values["value"], score_mod=values["score_mod"])
    torch.testing.assert_close(values["out"], expected)


def test_coming_from_t5():
    values = page_values("T5")
    sizes = {"d_model": 64, "d_kv": 16, "num_heads": 4, "relative_attention_num_buckets": 32}
    theirs = T5Attention(T5Config(**sizes, relative_attention_max_distance=128), has_relative_attention_bias=True)
    with torch.no_grad():
        theirs.relative_attention_bias.weight.copy_(values["position"].weight.T)
        bias = theirs.compute_bias(49, 49)
        scores = values["query"] @ values["key"].mT + bias
        expected = scores.masked_fill(~values["real"][:, None, None], -torch.inf).softmax(-1) @ values["value"]
    torch.testing.assert_close(values["out"], expected)


def test_coming_from_conformer():
    values = page_values("Conformer")
    query, vectors = values["query"] + values["v"], values["vectors"]
    offsets = torch.arange(49) - torch.arange(49)[:, None] + 48
    scores = (values["query"] + values["u"]) @ values["key"].mT + torch.einsum(
        "bhqd,hqkd->bhqk", query, vectors[:, offsets]
    )
    scores = (scores / 4).masked_fill(~values["real"][:, None, None], -torch.inf)
    torch.testing.assert_close(values["out"], scores.softmax(-1) @ values["value"])
