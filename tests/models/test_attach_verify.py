"""``attach`` verifies models: it refuses a model whose results would differ, and does not change it."""

import copy
import logging
import pickle
import threading
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from transformers.masking_utils import create_bidirectional_mask

from whereformer import attach, detach, load_attached
from whereformer.errors import InputError
from whereformer.models.attachment import find_calls
from whereformer.models.attachment.masks import MaskSpec, NotATensorError
from whereformer.models.attachment.trial_run import run_first_example

from .patched import BOTH, PATCHED
from .peers import MODELS, SIZES, batch, close, everything, make, refused, states
from .test_attach_patches import SOME


def make_bigbird():
    """Its encoder does not dispatch, and adds its mask; it becomes dense when it reads a short text."""
    config = transformers.BigBirdPegasusConfig(
        **BOTH, max_position_embeddings=64, attention_type="block_sparse", block_size=4
    )
    return make(transformers.BigBirdPegasusModel(config))


MISTRAL = {**SIZES, "num_key_value_heads": 1, "sliding_window": 4096}
ALL = {
    "bigbird": make_bigbird,
    **{name: lambda name=name: make(name) for name in MODELS},
    "mistral": lambda: make(transformers.MistralModel(transformers.MistralConfig(**MISTRAL))),
    "deberta": lambda: PATCHED["DebertaV2"].make().float(),
}


@pytest.fixture
def wrong(monkeypatch):
    """Return a function that changes what our attention gets in some layers, by default all, of the proof only."""
    right = find_calls.attend

    def change(function, layers=()):
        for layer in layers:
            layer.is_wrong = True  # copies have it, too

        def attend(module, query, key, value, mask, **options):
            if not layers or hasattr(module, "is_wrong"):
                query, mask = function(query, mask)
            return right(module, query, key, value, mask, **options)

        monkeypatch.setattr(find_calls, "attend", attend)

    return change


def layers_of(model):
    return list(dict.fromkeys(call.module for call in find_calls.find_calls(model)))


def slightly(query, mask):
    return query * 1.01, mask


@pytest.mark.parametrize("name", [*ALL, *SOME])
def test_nothing_of_a_model_changes(name, wrong):
    model = (ALL[name]() if name in ALL else PATCHED[name].make()).train()
    next(iter(model.children())).eval()
    before, random = everything(model), torch.get_rng_state()
    attach(model, "none")
    assert everything(model) != before
    detach(model)
    assert everything(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    wrong(slightly)
    with pytest.raises(InputError, match=r"^model: \w+ gives different results"):
        attach(model, "none")
    assert everything(model) == before


@pytest.mark.parametrize("name", [name for name in ALL if name != "bigbird"])
def test_scores_that_are_slightly_wrong_in_one_layer_are_refused(name, wrong):
    model = ALL[name]()
    names = {module: name for name, module in model.named_modules()}
    layers = layers_of(model)
    for layer in {layers[0]: None, layers[-1]: None}:
        wrong(slightly, [layer])
        with refused(
            rf"^model: {type(model).__name__} gives different results with whereformer's attention, even before "
            rf"a method is added: layer {names[layer]} differs by [\d.e-]+, relative to its largest value; expected at "
            r"most 2e-05. The model is unchanged$"
        ):
            attach(model, "tisa")
        assert not hasattr(model.config, "whereformer")
        del layer.is_wrong
    detach(attach(model, "tisa", verify=False))


@pytest.mark.parametrize("name", ["bert", "llama", "bart"])
def test_padding_that_is_not_looked_at_is_refused(name, wrong):
    model = ALL[name]()

    def look_everywhere(query, mask):
        return query, replace(mask, token_mask=None) if isinstance(mask, MaskSpec) else None

    wrong(look_everywhere, layers_of(model)[:1])
    with pytest.raises(InputError, match=r"^model: .* differs by"):
        attach(model, "tisa")


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_attention_to_nothing_is_refused(name, monkeypatch):
    """Its outputs are zeros, as of tokens that may see no key; but a row has no padding, and all of it counts."""
    monkeypatch.setattr(find_calls, "attend", lambda *args, **_: (torch.zeros_like(args[1]).transpose(1, 2), None))
    with pytest.raises(InputError, match=r"^model: .* differs by 1, relative"):
        attach(ALL[name](), "tisa")


def test_a_window_longer_than_any_batch_is_looked_at(wrong):
    model = ALL["mistral"]()
    windows = []

    def widen(query, mask):
        if not isinstance(mask, MaskSpec):
            return query, None
        windows.append(mask.window)
        return query, replace(mask, window=None)

    wrong(widen, layers_of(model)[1:2])
    with pytest.raises(InputError, match=r"layer layers.1.self_attn differs by"):
        attach(model, "tisa")
    assert windows[-1] == (5, 0)
    assert model.config.sliding_window == 4096


@pytest.mark.parametrize("name", ["gpt2", "llama", "bart", "t5"])
def test_decoders_are_verified_with_a_cache(name):
    example, outputs = run_first_example(make(name), 3, 14, cached=True)
    assert example.cache in ("cache", "past_key_values")
    n = 14 if name in ("gpt2", "llama") else 10
    assert sum(output.last_hidden_state.shape[1] for output in outputs) == n
    assert len(outputs) == 3


def test_layers_that_add_masks_themselves_get_padding():
    model = make_bigbird()
    inputs = {**batch(model), "attention_mask": torch.ones(3, 12, dtype=torch.long)}
    inputs["attention_mask"][1, 8:] = 0
    expected = states(copy.deepcopy(model), inputs)
    attach(model, "none")
    assert model.encoder.attention_type == "block_sparse"
    close(states(copy.deepcopy(model), inputs), expected)
    with refused(r"^attention_mask: layers that add masks to scores themselves support only pad"):
        torch.zeros(2, 2, 3, 3) + MaskSpec(3, causal=True)


def test_a_model_whose_layers_see_more_than_tokens_is_refused():
    deepseek = getattr(transformers, "DeepseekV4Config", None)
    if deepseek is None:
        pytest.skip("this transformers has no DeepSeek-V4")
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4}
    sizes |= {"q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "qk_rope_head_dim": 8, "num_hash_layers": 0}
    sizes |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    model = transformers.DeepseekV4Model(deepseek(**sizes, compress_rates=rates, layer_types=[*reversed(rates)]))
    for verify in (True, False):
        with pytest.raises(InputError, match=r"attention_mask: expected 5 keys, as the mask has, got 6$"):
            attach(model.eval(), "alibi", verify=verify)
    # No small example shows what is joined from 16 tokens on.
    rates = dict.fromkeys(rates, 16)
    model = transformers.DeepseekV4Model(deepseek(**sizes, compress_rates=rates, layer_types=[*reversed(rates)]))
    attach(model.eval(), "alibi", verify=False)
    with pytest.raises(InputError, match=r"^attention_mask: expected 20 keys, as the mask has, got 21$"):
        model(torch.arange(20).view(1, -1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_numbers(dtype, wrong):
    model = make("llama").to(dtype)
    detach(attach(model, "none"))
    wrong(lambda query, mask: (query * (1.01 if dtype is torch.float64 else 3), mask))
    with pytest.raises(InputError, match="differs by"):
        attach(model, "none")


def test_forwards_that_are_functions_are_refused():
    """A copy of the model would run the layer itself, whose call nobody would see."""
    model = make("llama")
    layer = model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(InputError, match=r"^model: layers.1.forward was replaced by a function, "):
        attach(model, "t5")
    del layer.forward
    layer.lock = threading.Lock()
    with refused(r"^model: attach checks a copy of the model, and copying failed \(cannot pickle"):
        attach(model, "t5")


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("position", ["none", "tisa", "t5", "fire"])
def test_a_model_that_a_mask_makes_causal_runs_with_and_without_one(position, verify):
    if not hasattr(transformers, "VideoPrismTextConfig"):
        pytest.skip("this transformers has no VideoPrism")
    model = make(transformers.VideoPrismTextModel(transformers.VideoPrismTextConfig(**SIZES)))
    ids = torch.randint(3, 50, (2, 7))
    calls = [{}, {"attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2])}]
    expected = [model(ids, **inputs).last_hidden_state for inputs in calls]
    attach(model, position, verify=verify)
    later = torch.cat((ids[:, :-1], 52 - ids[:, -1:]), 1)
    for inputs, plain in zip(calls, expected, strict=True):
        states = model(ids, **inputs).last_hidden_state
        if position == "none":
            close(states, plain)
        changed = (model(later, **inputs).last_hidden_state - states)[0, :6].abs().amax()
        assert (changed > 1e-4) == (not inputs)
    detach(model)
    with refused(r"^position: VideoPrismTextModel is causal only with an attention_mask, but L"):
        attach(model, "logn", verify=verify)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_calls_without_a_mask_are_verified(name, monkeypatch):
    """Here, ours is wrong only where no token is padding in a batch of one row."""
    right = find_calls.attend

    def attend(module, query, key, value, mask, **options):
        padded = isinstance(mask, MaskSpec) and mask.token_mask is not None
        return right(module, query if padded or len(query) > 1 else 2 * query, key, value, mask, **options)

    monkeypatch.setattr(find_calls, "attend", attend)
    with pytest.raises(InputError, match=r"^model: .* differs by"):
        attach(ALL[name](), "none")


def test_a_model_that_needs_its_mask_is_verified_with_one(caplog):
    class Masked(transformers.BertModel):
        def forward(self, input_ids=None, attention_mask=None, **inputs):
            if attention_mask is None:
                raise ValueError("expected a mask")
            return super().forward(input_ids, attention_mask, **inputs)

    model = attach(Masked(transformers.BertConfig(**SIZES)), "tisa")
    assert not caplog.messages
    assert not model.whereformer.model.causal


USES = [
    ("reads the attribute 'dtype' of", lambda mask, scores: scores if mask.dtype == torch.bool else -scores),
    ("calls where on", lambda mask, scores: torch.where(mask, scores, -1e9)),
    ("calls masked_fill on", lambda mask, scores: scores.masked_fill(mask, -1e9)),
    ("calls cat on", lambda mask, scores: torch.cat([mask, mask])),
    ("calls mul on", lambda mask, scores: scores * mask),
    ("applies an operator to", lambda mask, scores: (1.0 - mask) * scores),
    ("applies an operator to", lambda mask, scores: scores if mask == 0 else -scores),
    ("applies an operator to", lambda mask, scores: ~mask),
    ("indexes", lambda mask, scores: scores + mask[:, :, :2]),
    ("indexes", lambda mask, scores: scores + mask[0]),
    ("reads the attribute 'shape' of", lambda mask, scores: scores.view(mask.shape)),
    ("reads the attribute 'to' of", lambda mask, scores: scores + mask.to(scores.dtype)),
]


@pytest.mark.parametrize(("use", "compute"), USES)
def test_whatever_a_model_computes_with_its_mask_is_one_plain_line(use, compute):
    class Model(transformers.BertModel):
        def forward(self, input_ids=None, attention_mask=None, **inputs):
            mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=self.embeddings(input_ids), attention_mask=attention_mask
            )
            compute(mask, torch.zeros(len(input_ids), 2, 2, 2))
            return super().forward(input_ids, attention_mask, **inputs)

    with pytest.raises(InputError) as caught:
        attach(Model(transformers.BertConfig(**SIZES)), "tisa")
    line = str(caught.value)
    assert line.endswith(f"attention_mask: the model {use} its mask, but whereformer's attention builds no mask matrix")


def test_a_mask_is_an_object_that_can_be_copied():
    mask = MaskSpec(3, token_mask=torch.ones(1, 3, dtype=torch.bool))
    assert not hasattr(mask, "to")
    assert not hasattr(mask, "device")
    assert torch.equal(copy.deepcopy(mask).token_mask, mask.token_mask)
    assert mask == mask
    assert mask != MaskSpec(3)
    assert mask != None  # noqa: E711
    error = NotATensorError("attention_mask", "the model indexes it")
    assert pickle.loads(pickle.dumps(error)).field == "attention_mask"


def test_rounding_that_is_allowed_elsewhere_is_no_difference():
    model = make("llama")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            attach(model, "none")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_weights_that_are_not_there_are_not_verified(caplog):
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig(**SIZES))
    with caplog.at_level(logging.WARNING):
        attach(model, "none")
    assert [record.getMessage() for record in caplog.records] == [
        "could not verify that BertModel gives the same results with whereformer's attention: weights of torch.float32 "
        "on 'meta' cannot be compared"
    ]


def test_a_model_with_few_positions_is_verified(caplog):
    config = transformers.BertConfig(**{**SIZES, "max_position_embeddings": 12})
    with caplog.at_level(logging.WARNING):
        attach(transformers.BertModel(config), "none")
    assert not caplog.messages


def test_numbers_that_are_none_are_not_verified(caplog):
    model = make("llama")
    nn.init.constant_(model.layers[1].self_attn.q_proj.weight, torch.nan)
    attach(model, "none")
    assert caplog.messages[0].endswith("attention: layer layers.1.self_attn computes NaN")


def test_a_model_whose_own_attention_does_not_run_is_not_verified(caplog):
    model = make("llama")
    model.config._attn_implementation_internal = "missing"
    attach(model, "none")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("could not verify that LlamaModel gives the same results with whereformer's attention: ")
    detach(model)
    assert model.config._attn_implementation == "missing"


def test_loading_verifies(tmp_path, wrong):
    attach(make("bert"), "tisa").save_pretrained(tmp_path)
    load_attached(tmp_path, transformers.AutoModel)
    wrong(slightly)
    with pytest.raises(InputError, match=r"^model: BertModel gives different results"):
        load_attached(tmp_path, transformers.AutoModel)
    load_attached(tmp_path, transformers.AutoModel, verify=False)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: transformers.DecisionTransformerModel(transformers.DecisionTransformerConfig(n_layer=1)),
            "expected a text model, or an audio model with a known input format; DecisionTransformerModel reads "
            "'states'; attach to a part of it: encoder",
        ),
        (
            lambda: transformers.Blip2QFormerModel(
                transformers.Blip2QFormerConfig(**SIZES, encoder_hidden_size=16, pad_token_id=0)
            ),
            "Blip2QFormerModel did not run on input_ids, attention_mask: TypeError: Blip2QFormerModel.forward() "
            "missing 1 required positional argument: 'query_embeds'",
        ),
    ],
)
def test_models_that_read_something_else(model, message):
    model = model()
    before = everything(model)
    with pytest.raises(InputError) as error:
        attach(model, "tisa")
    assert str(error.value) == f"model: {message}"
    assert everything(model) == before
