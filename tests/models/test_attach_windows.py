"""Windows, soft caps, sinks and grouped heads of transformers' own models, with position methods attached to them."""

import pytest
import torch
import transformers
from transformers import masking_utils as masks

from whereformer import attach, detach
from whereformer.kernels import attention
from whereformer.models.attachment import interface

from .checkpointing import checkpoint_activations
from .peers import SIZES
from .test_attach import batch, close, make, make_modernbert, states, switch, train_step

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
    "mistral": lambda: transformers.MistralModel(transformers.MistralConfig(**GROUPED)),
    "qwen2": lambda: transformers.Qwen2Model(
        transformers.Qwen2Config(**GROUPED, use_sliding_window=True, max_window_layers=1)
    ),
    "gemma2": lambda: transformers.Gemma2Model(
        transformers.Gemma2Config(**GROUPED, query_pre_attn_scalar=8, attn_logit_softcapping=3.0)
    ),
    "gemma3": lambda: transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**GROUPED, query_pre_attn_scalar=8)),
    "gpt_oss": lambda: transformers.GptOssModel(
        transformers.GptOssConfig(**GROUPED, **ROTARY, num_local_experts=2, num_experts_per_tok=1)
    ),
    "modernbert": make_modernbert,
}
WINDOWS = {"modernbert": (3, 3)}


@pytest.fixture
def calls(monkeypatch):
    """What attached models ask of attention: keyword arguments, and the number of key heads."""
    found = []

    def spy(query, key, value, terms, **options):
        found.append({**options, "terms": terms, "key_heads": key.shape[1]})
        return attention(query, key, value, terms, **options)

    monkeypatch.setattr(interface, "attention", spy)
    return found


def left_padded(model):
    inputs = batch(model)
    return {name: tensor.flip(1) for name, tensor in inputs.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_stays_what_it_is(name, calls):
    model = make(MODELS[name]())
    given = [batch(model, padded=False), batch(model), left_padded(model)]
    switch(model, "eager")
    expected = [train_step(model, inputs) for inputs in given]
    attach(model, "none")
    for inputs, wanted in zip(given, expected, strict=True):
        calls.clear()
        close(train_step(model, inputs), wanted, factor=10)
        windows = [call.get("window") for call in calls]
        assert set(windows) <= {None, WINDOWS.get(name, (3, 0))}
        assert any(windows)
        # No matrix, and no copies of keys
        assert not any(call["terms"] for call in calls)
        assert {call["key_heads"] for call in calls} == {2}
        assert all((call["softcap"] == 3.0) == (name == "gemma2") for call in calls)
        assert all((call["sinks"] is not None) == (name == "gpt_oss") for call in calls)
        assert all(("key_mask" in call) == ("attention_mask" in inputs) for call in calls)
    detach(model)


@pytest.mark.parametrize("position", ["tisa", "rope", "floater", "shaw"])
@pytest.mark.parametrize("name", ["mistral", "modernbert", "gpt_oss"])
def test_a_window_is_the_mask_that_it_was(name, position, monkeypatch):
    model = attach(make(MODELS[name]()), position)
    for inputs in (batch(model), left_padded(model)):
        found = train_step(model, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(interface, "_window", lambda *_: None)
            close(found, train_step(model, inputs), factor=10)


@pytest.mark.parametrize("length", [2, 4, 5])
def test_a_window_that_sees_all_is_none(length, calls):
    model = attach(make(MODELS["mistral"]()), "none")
    states(model, batch(model, length, padded=False))
    assert [call.get("window") for call in calls] == [(3, 0) if length > 4 else None] * 3


def test_a_window_of_one_token():
    model = make(transformers.MistralModel(transformers.MistralConfig(**{**GROUPED, "sliding_window": 1})))
    switch(model, "eager")
    expected = states(model)
    close(states(attach(model, "none")), expected)


def test_generation_continues_past_the_window():
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED))
    inputs = batch(make(model), length=6, padded=False)
    switch(model, "eager")
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **options)
    attach(model, "none")
    for cached in (True, False):
        found = model.generate(**inputs, **options, use_cache=cached)
        assert torch.equal(found.sequences, expected.sequences)
        close(found.logits, expected.logits)


def test_weights_are_those_of_the_model():
    model = make(MODELS["gpt_oss"]())
    switch(model, "eager")
    expected = model(**batch(model, padded=False), output_attentions=True).attentions
    found = attach(model, "none")(**batch(model, padded=False), output_attentions=True).attentions
    close(found, expected)


def test_packed_rows_stay_apart(calls):
    model = make(MODELS["mistral"]())
    # With a cache, transformers does not look whether rows are packed.
    inputs = {**batch(model, padded=False), "position_ids": torch.tensor([[*range(5), *range(7)]]), "use_cache": False}
    switch(model, "eager")
    expected = states(model, inputs)
    close(states(attach(model, "none"), inputs), expected)
    assert all(len(call["terms"]) == 1 and "window" not in call for call in calls)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_windows(reentrant):
    model = attach(make(MODELS["mistral"]()), "tisa")
    expected = train_step(model)
    checkpoint_activations(model, use_reentrant=reentrant)
    close(train_step(model), expected)


@pytest.mark.slow
def test_compiled_models_have_a_matrix():
    torch.compiler.reset()
    model = attach(make(MODELS["mistral"]()), "tisa")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    inputs = batch(model, padded=False)
    close(states(compiled, inputs), states(model, inputs))


def test_only_windows_count_as_windows():
    def mask(function, size=4, **more):
        sizes = {"batch_size": 1, "q_length": 9, "kv_length": 9, "local_size": size, "allow_is_causal_skip": False}
        return interface.mask(**{**sizes, **more}, mask_function=function)

    causal, both = masks.sliding_window_causal_mask_function, masks.sliding_window_bidirectional_mask_function
    assert mask(causal(4)) == (3, 0, 9, None)
    assert mask(both(4)) == (4, 4, 9, None)
    padded = mask(causal(4), attention_mask=torch.arange(9)[None] < 7)
    assert padded[:2] == (3, 0)
    assert padded.padding.shape == (1, 1, 1, 9)
    everything = masks.bidirectional_mask_function
    for other in (
        causal(5),
        masks.sliding_window_overlay(4),
        masks.or_masks(causal(4), everything),
        masks.and_masks(causal(4), everything),
        masks.and_masks(masks.sliding_window_overlay(4), everything),
        masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
    ):
        assert mask(other).shape == (1, 1, 9, 9)
    assert mask(causal(4), None).shape == (1, 1, 9, 9)
    # The last query is not at the last key.
    assert mask(causal(4), kv_length=12).shape == (1, 1, 9, 12)


def test_a_window_over_other_keys_is_refused():
    """DeepSeek-V4 joins keys of whole pieces to those of tokens, and lets a mask that is no tensor be."""
    tensor = torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match=r"^attention_mask: expected the 4 keys that the window is over, got 5$"):
        interface.attend(torch.nn.Identity(), tensor, tensor, tensor, interface.WindowMask(1, 0, 4, None))


def test_a_model_whose_layers_see_more_than_tokens_is_refused():
    deepseek = getattr(transformers, "DeepseekV4Config", None)
    if deepseek is None:
        pytest.skip("this transformers has no DeepSeek-V4")
    sizes = {"head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "num_experts_per_tok": 2}
    sizes |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "qk_rope_head_dim": 8, "num_hash_layers": 0}
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4}
    model = transformers.DeepseekV4Model(deepseek(**{**GROUPED, **sizes}, compress_rates=rates))
    with pytest.raises(ValueError, match=r"^model: DeepseekV4Model has no layer in which tokens attend to one another"):
        attach(model, "tisa")


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_keys_that_a_model_chooses_are_refused(name):
    tensor = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=rf"^{name}: whereformer's attention chooses no keys, got tensor"):
        interface.attend(torch.nn.Identity(), tensor, tensor, tensor, None, **{name: torch.zeros(1, 3)})
