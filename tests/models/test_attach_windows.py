"""Windows, soft caps, sinks and grouped heads of transformers' own models, with position methods attached to them."""

from dataclasses import astuple
from functools import partial

import pytest
import torch
import transformers
from transformers import masking_utils

from whereformer import attach, detach
from whereformer.errors import InputError
from whereformer.kernels import attention
from whereformer.models.attachment import attention_function, masks
from whereformer.models.inputs import CACHE

from .peers import MODELS as PEERS
from .peers import SIZES, attach_unverified, batch, build, close, close_steps, make, states, switch, train_step

GROUPED = {
    **SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# transformers warns about the sizes of a GPT-OSS without these.
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

MODELS = {
    "mistral": partial(build, "Mistral", GROUPED),
    "qwen2": partial(build, "Qwen2", {**GROUPED, "use_sliding_window": True, "max_window_layers": 1}),
    "gemma2": partial(build, "Gemma2", {**GROUPED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0}),
    "gemma3": partial(build, "Gemma3Text", {**GROUPED, "query_pre_attn_scalar": 8}),
    "gpt_oss": partial(build, "GptOss", {**GROUPED, **ROTARY, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "modernbert": PEERS["modernbert"],
}
WINDOWS = {"modernbert": (3, 3)}


@pytest.fixture
def calls(monkeypatch):
    """What attached models ask of attention: keyword arguments, and the number of key heads."""
    records = []

    def spy(query, key, value, terms, **options):
        records.append({**options, "terms": terms, "key_heads": key.shape[1]})
        return attention(query, key, value, terms, **options)

    monkeypatch.setattr(attention_function, "attention", spy)
    return records


def left_padded(model):
    inputs = batch(model)
    return {name: tensor.flip(1) for name, tensor in inputs.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_stays_what_it_is(name, calls):
    model = make(MODELS[name]())
    batches = [batch(model, padded=False), batch(model), left_padded(model)]
    switch(model, "eager")
    expected = [train_step(model, inputs) for inputs in batches]
    attach(model, "none")
    for inputs, expected_step in zip(batches, expected, strict=True):
        calls.clear()
        close(train_step(model, inputs), expected_step, factor=10)
        windows = [call.get("window") for call in calls]
        assert set(windows) <= {None, WINDOWS.get(name, (3, 0))}
        assert any(windows)
        # No matrix, and no copies of keys
        assert not any(call["terms"] for call in calls)
        assert {call["key_heads"] for call in calls} == {2}
        assert all((call["softcap"] == 3.0) == (name == "gemma2") for call in calls)
        assert all((call["sinks"] is not None) == (name == "gpt_oss") for call in calls)
        assert all((call["key_mask"] is None) == ("attention_mask" not in inputs) for call in calls)
    detach(model)


@pytest.mark.parametrize("position", ["tisa", "rope", "shaw"])
@pytest.mark.parametrize("name", ["mistral", "modernbert", "gpt_oss"])
def test_a_window_is_the_mask_that_it_was(name, position, monkeypatch):
    model = attach_unverified(make(MODELS[name]()), position, keep_absolute=position != "rope")
    for inputs in (batch(model), left_padded(model)):
        actual = train_step(model, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(masks, "_parse_mask_function", lambda *_: None)
            close(actual, train_step(model, inputs), factor=10)


def test_sinks_of_queries(calls):
    """Those of Inkling 2, whose residuals between layers are attention too, to other things than tokens."""
    modeling = pytest.importorskip(
        "transformers.models.inkling2.modeling_inkling2", reason="this transformers is older"
    )
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = modeling.Inkling2TextConfig(
        vocab_size=64,
        unpadded_vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        **sizes,
        **{f"swa_{name}": size for name, size in sizes.items()},
        sliding_window_size=4,
        rel_extent=16,
        d_rel=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=4,
        n_layers_per_attn_res_block=1,
        layer_types=["hybrid_sliding", "hybrid", "hybrid"],
    )
    model = make(modeling.Inkling2TextModel(config))
    inputs = batch(model, padded=False)
    switch(model, "eager")
    expected = train_step(model, inputs)
    attach(model, "none")
    calls.clear()
    close_steps(train_step(model, inputs), expected)
    assert [tuple(call["sinks"].shape) for call in calls if call["sinks"] is not None] == [(3, 4, 12)] * 3
    detach(model)
    attach(model, "tisa")
    assert model.whereformer is not None


@pytest.mark.slow
def test_compiled_models_have_a_matrix():
    torch.compiler.reset()
    model = attach_unverified(make(MODELS["mistral"]()), "tisa")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    inputs = batch(model, padded=False)
    close(states(compiled, inputs), states(model, inputs))


def test_a_matrix_stands_for_other_patterns_only():
    def mask(function, n_q=9, n_k=9, q_offset=0, kv_offset=0, attention_mask=None):
        return masks.make_mask_spec(1, n_q, n_k, q_offset, kv_offset, function, attention_mask)

    everything, causal = masking_utils.bidirectional_mask_function, masking_utils.causal_mask_function
    before, both = (
        masking_utils.sliding_window_causal_mask_function,
        masking_utils.sliding_window_bidirectional_mask_function,
    )
    assert astuple(mask(everything)) == (9, 0, False, None, None, None, None)
    assert astuple(mask(causal)) == (9, 0, True, None, None, None, None)
    assert astuple(mask(before(4))) == (9, 0, True, (3, 0), None, None, None)
    assert astuple(mask(both(4))) == (9, 0, False, (4, 4), None, None, None)
    # After 5 tokens have left a cache
    real = torch.arange(14)[None] > 2
    slid = mask(before(4), 1, 9, 13, 5, real)
    assert astuple(slid)[:4] == (9, 5, True, (3, 0))
    assert slid.token_mask is not None
    site = slid.site(torch.zeros(1, 1, 1, 4), None)
    assert (site.key_mask.tolist(), site.num_dropped_keys.tolist()) == ([[True] * 9], [[2]])
    for pattern in (
        masking_utils.sliding_window_overlay(4),
        masking_utils.or_masks(before(4), everything),
        masking_utils.and_masks(before(4), everything),
        masking_utils.and_masks(masking_utils.sliding_window_overlay(4), everything),
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
    ):
        spec = mask(pattern)
        assert astuple(spec)[:-1] == (9, 0, False, None, None, None)
        assert torch.equal(spec.matrix, masking_utils.sdpa_mask(1, 9, 9, 0, 0, pattern, allow_is_causal_skip=False))
    # The last query is not at the last key.
    for pattern in (causal, before(4), both(4)):
        spec = mask(pattern, 9, 12, attention_mask=torch.arange(12)[None] < 11)
        assert torch.equal(spec.matrix, masking_utils.sdpa_mask(1, 9, 12, 0, 0, pattern, allow_is_causal_skip=False))
        assert spec.token_mask.tolist() == [[True] * 11 + [False]]
    with pytest.raises(ValueError, match=r"^cache: expected a cache that grows, got a static one$"):
        mask(causal, 9, 12)


def test_a_mask_over_other_keys_is_refused():
    """DeepSeek-V4 joins keys of whole pieces to those of tokens, and lets a mask that is no tensor be."""
    tensor = torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match=r"^attention_mask: expected 4 keys, as the mask has, got 5$"):
        attention_function.attend(torch.nn.Identity(), tensor, tensor, tensor, masks.MaskSpec(4))


@pytest.mark.parametrize("name", ["DeepseekV32", "MistralLarge4Text"])
def test_a_model_that_chooses_keys_by_its_mask_is_refused(name):
    config = getattr(transformers, f"{name}Config", None)
    if config is None:
        pytest.skip(f"this transformers has no {name}")
    sizes = {**SIZES, "num_hidden_layers": 2, "moe_intermediate_size": 8, "n_routed_experts": 8}
    sizes |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    model = transformers.AutoModel.from_config(config(**sizes)).eval()
    with pytest.raises(InputError, match=r"^model: .* attention_mask: the model [a-z]+ .*its mask, but whereformer's"):
        attach(model, "none")


@pytest.mark.parametrize("position", ["none", "tisa"])
def test_layers_that_share_the_keys_of_others_are_served(position):
    """They have no length of their own in the cache."""
    gemma = getattr(transformers, "Gemma3nTextConfig", None)
    if gemma is None:
        pytest.skip("this transformers has no Gemma 3n")
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = {"hidden_size_per_layer_input": 8, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
    sizes |= {"vocab_size_per_layer_input": SIZES["vocab_size"], "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(gemma(**{**GROUPED, **sizes}, layer_types=kinds)).eval()
    attach(model, position)
    ids = torch.randint(3, 30, (1, 9))
    with torch.no_grad():
        logits = model(ids).logits
        cache = model(ids[:, :4], use_cache=True)[CACHE]
        model(ids[:, 4:5], **{CACHE: cache})
        torch.testing.assert_close(model(ids[:, 5:], **{CACHE: cache}).logits, logits[:, 5:], atol=1e-4, rtol=1e-4)
