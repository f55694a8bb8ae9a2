"""Caches of rotated keys: attached models generate the same with a cache as without, whatever happens to the cache."""

import itertools

import pytest
import torch
import transformers

import whereformer
from whereformer.models.inputs import CACHE
from whereformer.positions.rope import Rope

from .peers import attach_unverified, enlarge

ROTATING = ["rope", "rope+tisa", "shaw+rope", "rope/none", "logn+rope"]
"""Methods whose keys are cached after their rotation; not with "fox", which reads all keys."""
CAUSAL = sorted({*whereformer.position_names()} - {"sinusoidal", "learned", "synthesizer"})
"""Methods that GPT-2 gets instead of its own positions; "none" keeps them."""


def make(position, kind="Llama", **options):
    """Return a small decoder with random weights, and grouped heads except in GPT-2; Mistral caches three keys."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=60,
        hidden_size=32,
        num_attention_heads=4,
        **({} if kind == "GPT2" else {"num_key_value_heads": 2}),
        num_hidden_layers=2,
        intermediate_size=24,
        pad_token_id=0,
        eos_token_id=None,
        **({"sliding_window": 4} if kind == "Mistral" else {}),
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    return enlarge(attach_unverified(model, position, keep_absolute=position == "none", **options), 0.2)


IDS = torch.randint(5, 50, (2, 12), generator=torch.Generator().manual_seed(0))


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "position"),
    [*itertools.product(("Llama", "Mistral"), (*ROTATING, "rope+fox")), *itertools.product(["GPT2"], CAUSAL)],
)
@torch.no_grad()
def test_tokens_in_pieces_are_the_tokens_at_once(kind, position):
    model = make(position, kind)
    cache = transformers.DynamicCache(config=model.config)
    pieces = [IDS[:, :5], IDS[:, 5:8], *IDS[:, 8:].split(1, 1)]
    logits = torch.cat([model(piece, **{CACHE: cache}).logits for piece in pieces], 1)
    close(logits, model(IDS, use_cache=False).logits)
    assert type(cache) is transformers.DynamicCache


@pytest.mark.parametrize("position", ROTATING)
@torch.no_grad()
def test_caches_are_cropped_reordered_and_repeated(position):
    model = make(position)
    cache = transformers.DynamicCache(config=model.config)
    model(IDS[:, :9], **{CACHE: cache})
    cache.crop(-4)
    close(model(IDS[:, 5:7], **{CACHE: cache}).logits, model(IDS[:, :7], use_cache=False).logits[:, 5:])
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = torch.cat([IDS[[1, 0], :7], IDS[:, 7:]], 1)
    close(model(IDS[:, 7:9], **{CACHE: cache}).logits, model(swapped[:, :9], use_cache=False).logits[:, 7:])
    cache.batch_repeat_interleave(2)
    last_ids = IDS[:, 9:].repeat_interleave(2, 0)
    expected = model(swapped, use_cache=False).logits[:, 9:].repeat_interleave(2, 0)
    close(model(last_ids, **{CACHE: cache}).logits, expected)


@pytest.mark.parametrize("position", ROTATING)
@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
@torch.no_grad()
def test_beams_and_left_padding_generate_the_same(kind, position):
    model = make(position, kind)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    for options in ({"num_beams": 3}, {"attention_mask": mask}):
        options = {**options, "do_sample": False, "max_new_tokens": 6}
        assert torch.equal(model.generate(IDS, **options), model.generate(IDS, **options, use_cache=False))


@torch.no_grad()
def test_each_key_is_rotated_once_with_its_own_heads(monkeypatch):
    model = make("rope")
    keys, transform_qkv = [], Rope.transform_qkv
    monkeypatch.setattr(
        Rope, "transform_qkv", lambda self, *args: keys.append(args[1].shape[1:3]) or transform_qkv(self, *args)
    )
    cache = transformers.DynamicCache(config=model.config)
    model(IDS[:, :8], **{CACHE: cache})
    assert {*keys} == {(2, 8)}
    keys.clear()
    model(IDS[:, 8:9], **{CACHE: cache})
    assert {*keys} == {(2, 1)}


def test_gradients_flow_through_a_cache():
    model = make("rope+tisa")
    full_logits = model(IDS, use_cache=False).logits[:, 6:]
    cache = transformers.DynamicCache(config=model.config)
    model(IDS[:, :6], **{CACHE: cache})
    pieces = model(IDS[:, 6:], **{CACHE: cache}).logits
    parameters = list(model.parameters())
    expected, actual = (torch.autograd.grad(logits.square().sum(), parameters) for logits in (full_logits, pieces))
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        close(gradient, expected_gradient)
