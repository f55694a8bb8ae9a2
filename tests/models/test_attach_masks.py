"""Who sees whom: attached models of every kind see what their own masks show, also in packed rows and with a cache."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from whereformer import attach, detach
from whereformer.errors import InputError
from whereformer.models import checks
from whereformer.models.attachment import attention_function, hooks, masks
from whereformer.positions import visible_keys

from .patched import BOTH
from .peers import DISTIL, GPT2, SIZES, T5, attach_unverified, build, close, make, positions_of, refused
from .peers import KINDS as KINDS_OF_PEERS
from .test_attach_windows import GROUPED
from .test_attach_windows import MODELS as WINDOWED

# Importing DeBERTa scripts functions in older releases of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")

EXPERTS = {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 32}
ENDING = {**SIZES, "eos_token_id": 2}
PAIR = {**BOTH, "max_position_embeddings": 40, "encoder_sparse_step": 0, "decoder_sparse_step": 0}
ENCODERS = {
    **dict.fromkeys(("Bert", "Roberta", "XLMRobertaXL", "Electra", "Ernie", "Data2VecText", "LayoutLM"), SIZES),
    **dict.fromkeys(("RobertaPreLayerNorm", "MobileBert", "NomicBert", "Splinter", "MarkupLM"), SIZES),
    **dict.fromkeys(("AlignText", "ClapText", "AltCLIPText", "ChineseCLIPText", "DebertaV2"), SIZES),
    "Albert": {**SIZES, "embedding_size": 8},
    "DistilBert": DISTIL,
    "ModernBert": KINDS_OF_PEERS["modernbert"][1],
    "EuroBert": GROUPED,
    "Llama": {**GROUPED, "is_causal": False},
    "Mistral": {**GROUPED, "is_causal": False},
    "Gemma3Text": {**GROUPED, "use_bidirectional_attention": True},
}
DECODERS = {
    **dict.fromkeys(("CLIPText", "OwlViTText", "CLIPSegText", "BioGpt"), ENDING),
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma3Text", "Phi", "Phi3"), GROUPED),
    **dict.fromkeys(("StableLm", "Starcoder2", "Olmo2", "Cohere2", "Granite", "Glm4", "Nemotron", "Exaone4"), GROUPED),
    **dict.fromkeys(("Mixtral", "GptOss", "Llama4Text"), EXPERTS),
    "GPT2": GPT2,
    "GPTNeoX": SIZES,
    "OPT": {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "Bert": {**SIZES, "is_decoder": True},
}
ONE_TOKEN = {**GROUPED, "sliding_window": 1}
PAIRS = {
    **dict.fromkeys(("Bart", "MBart", "Pegasus", "M2M100", "Marian", "Blenderbot", "NllbMoe"), PAIR),
    **dict.fromkeys(("T5", "MT5", "SwitchTransformers", "LongT5"), T5),
    "PegasusX": {**PAIR, "block_size": 4, "num_global_tokens": 2},
}
KINDS = {
    **{f"{name} encodes": (name, options, [False]) for name, options in ENCODERS.items()},
    **{f"{name} decodes": (name, options, [True]) for name, options in DECODERS.items()},
    "Mistral decodes in windows of one token": ("Mistral", ONE_TOKEN, [True]),
    # The encoders of two have attention of their own, which is not served.
    **{
        name: (name, options, [True] if name in ("LongT5", "PegasusX") else [False, True])
        for name, options in PAIRS.items()
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_everyone_sees_what_the_models_own_masks_show(kind):
    name, options, causal = KINDS[kind]
    if not hasattr(transformers, f"{name}Model"):
        pytest.skip(f"this transformers has no {name}")
    model = make(build(name, options))
    torch.manual_seed(1)
    ids, real = torch.randint(5, 50, (3, 9)), torch.ones(3, 9, dtype=torch.int64)
    real[1, 6:] = real[2, :2] = 0
    inputs, last = {"input_ids": ids, "attention_mask": real}, "input_ids"
    keep = real.bool()
    if name in PAIRS:
        inputs["decoder_input_ids"], last, keep = torch.randint(5, 50, (3, 7)), "decoder_input_ids", slice(None)

    @torch.no_grad()
    def run():
        unmasked = {key: value for key, value in inputs.items() if key != "attention_mask"}
        changed = {**unmasked, last: torch.cat([unmasked[last][:, :-1], 54 - unmasked[last][:, -1:]], 1)}
        states = [model(**arguments).last_hidden_state for arguments in (inputs, unmasked, changed)]
        return states[0][keep], states[1], (states[1] - states[2])[:, :-1].abs().max()

    expected = run()
    attach_unverified(model, "none")
    actual = run()
    for ours, theirs in zip(actual[:2], expected[:2], strict=True):
        assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()
    assert [position.model.causal for position in positions_of(model)] == causal
    assert (actual[2] < 2e-5 * actual[1].abs().max()) == causal[-1]


def make_bert(**options):
    return make(build("Bert", {**SIZES, **options}))


def make_decoder(name, **options):
    return make(build(name, {**GROUPED, **options}))


def test_causality_is_what_it_was_when_a_method_was_attached():
    ids = torch.randint(3, 50, (2, 7))
    llama = attach_unverified(make_decoder("Llama"), "t5")
    expected = llama(ids, is_causal=True).last_hidden_state
    with pytest.raises(InputError, match=r"^is_causal: is_causal=False needs config.is_causal=False before you attach"):
        llama(ids, is_causal=False)
    close(llama(ids).last_hidden_state, expected)
    llama.config.is_causal = False
    with pytest.raises(InputError, match=r"^is_causal: expected True, as when the method was attached, got False$"):
        llama(ids)
    with pytest.raises(InputError, match=r"^is_causal: is_causal=True needs config.is_causal=True"):
        attach_unverified(make_bert(), "none")(ids, is_causal=True)


# Options


def test_options_that_may_change_scores_are_refused():
    model = attach_unverified(make_decoder("Llama"), "none")
    ids = torch.randint(3, 50, (2, 7))
    expected = model(ids).last_hidden_state
    harmless = {"num_items_in_batch": 3, "token_type_ids": torch.zeros_like(ids), "return_dict": True, "sinks": None}
    close(model(ids, **harmless).last_hidden_state, expected)
    for name, value, shown in (
        ("scores", torch.ones(2, 7), r"a tensor of shape \(2, 7\)"),
        ("head_mask", False, "False"),
    ):
        message = rf"^{name}: not supported by .* and may change scores; LlamaAttention passed {shown}$"
        with pytest.raises(InputError, match=message):
            model(ids, **{name: value})


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_keys_that_a_model_chooses_are_refused(name):
    tensor = torch.zeros(1, 2, 3, 4)
    with pytest.raises(InputError, match=rf"^{name}: not supported by .* passed a tensor of shape"):
        attention_function.attend(nn.Identity(), tensor, tensor, tensor, None, **{name: torch.zeros(1, 3)})


def test_no_attention_function_of_transformers_reads_ignored_options():
    folder, read = Path(transformers.__file__).parent, set()
    for file in (*folder.glob("models/*/modeling_*.py"), *folder.glob("integrations/*.py")):
        for arguments in re.findall(r"def \w*attention_forward\((.*?)\) ?[-:]", file.read_text("utf-8"), re.DOTALL):
            read |= {*re.findall(r"(\w+):", arguments)}
    assert read >= {"query", "s_aux", "softcap", "position_bias"}
    # Windows come with the mask. FlashAttention reads the longest text, and a cache that is divided into pages.
    assert read & attention_function.IGNORED_OPTIONS <= {"sliding_window", "max_length_q", "max_length_k", "cache"}


# Generation


@pytest.mark.parametrize("position", ["logn", "tupe", "floater", "fire", "inkling", "tisa"])
def test_positions_go_on_where_a_cache_slides(position):
    model = make(transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED)))
    method_options = {"fire": {"initial_threshold": 2.0}, "inkling": {"log_scaling": 4}}
    attach_unverified(model, position, **method_options.get(position, {}))
    for parameter in model.model.whereformer.parameters():
        nn.init.normal_(parameter, std=0.5)
    ids, real = torch.randint(5, 50, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    real[1, :3] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    cached, uncached = (
        model.generate(ids, attention_mask=real, use_cache=use_cache, eos_token_id=None, **options)
        for use_cache in (True, False)
    )
    assert torch.equal(cached.sequences, uncached.sequences)
    close(cached.logits, uncached.logits)


def generate(model, length, **options):
    ids = torch.randint(5, 50, (1, length))
    return model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, **options)


@pytest.mark.parametrize("length", [3, 8])
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_caches_that_do_not_grow_are_refused(name, length):
    """Their last key is not that of the last query."""
    options = {**GROUPED, "sliding_window": 6 if name == "Mistral" else None}
    model = attach_unverified(build(name, options, "ForCausalLM").eval(), "none")
    with pytest.raises(InputError, match=r"^(cache|attention_mask): .* static"):
        generate(model, length, cache_implementation="static")


# Packed rows

LENGTHS = (5, 3, 1, 6)
ENDS = torch.tensor((0, *LENGTHS), dtype=torch.int32).cumsum(0, dtype=torch.int32)
DOCUMENTS = torch.arange(4, dtype=torch.int32).repeat_interleave(torch.tensor(LENGTHS))[None]
WAYS = {
    "position_ids": {"use_cache": False},
    "position_ids, with a cache": {},
    "position_ids, with a mask": {"attention_mask": torch.ones(1, 15, dtype=torch.long)},
    "position_ids, with both": {"attention_mask": torch.ones(1, 15, dtype=torch.bool), "use_cache": False},
    "cu_seq_lens_q": {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 6, "max_length_k": 6},
    "seq_idx": {"seq_idx": DOCUMENTS},
}


def packed(way):
    """Texts, and the same in one row."""
    texts = torch.randint(3, 50, (1, sum(LENGTHS))).split(LENGTHS, 1)
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return texts, {"input_ids": torch.cat(texts, 1), "position_ids": position_ids, **WAYS[way]}


@pytest.mark.parametrize("position", ["tisa", "shaw", "logn", "floater", "tupe+t5", "fire", "rope+fire", "rope+shaw"])
@pytest.mark.parametrize("name", ["bert", "Llama", "Mistral"])
def test_texts_in_a_row_stay_apart(name, position):
    """In every way to say where a text begins; a model that isn't causal does not read it off position_ids."""
    options = {} if "rope" not in position else {"keep_absolute": False}
    model = attach_unverified(make_bert() if name == "bert" else make_decoder(name), position, **options)
    for way in [way for way in WAYS if name != "bert" or "seq" in way]:
        texts, row = packed(way)
        alone = torch.cat([model(ids).last_hidden_state for ids in texts], 1)
        close(model(**row).last_hidden_state, alone)


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if "position_ids" in way])
@pytest.mark.parametrize("position", ["tisa", "tupe"])
def test_compiled_code_tells_texts_by_positions(position, way):
    model = attach_unverified(make_decoder("Llama"), position)
    texts, row = packed(way)
    with torch.no_grad():
        alone = torch.cat([model(ids).last_hidden_state for ids in texts], 1)
        close(torch.compile(model, backend="eager")(**row).last_hidden_state, alone)


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("position", ["tisa", "fire", "logn"])
def test_texts_beside_padding_stay_apart(position, looks, monkeypatch):
    """On a GPU, nobody looks at positions or masks."""
    for module in (hooks, masks, checks, visible_keys):
        monkeypatch.setattr(module, "can_read", lambda tensor: looks)
    model = attach_unverified(make_decoder("Llama"), position)
    texts, _ = packed("position_ids")
    alone = torch.cat([model(ids).last_hidden_state for ids in texts], 1)
    mask = torch.tensor([[0, *[1] * 5, 0, *[1] * 10, 0, 0], [0] * 2 + [1] * 15 + [0] * 2])
    real = mask[0].bool()
    ids = torch.randint(3, 50, (2, 19))
    ids[0, real] = torch.cat(texts, 1)[0]
    positions = torch.ones_like(ids)
    positions[0, real] = torch.cat([torch.arange(n) for n in LENGTHS])
    for row in (positions[1], torch.arange(19)):  # padding counts, or not
        positions[1] = row
        if row[-1] == 1:
            positions[1, 2:17] = torch.arange(15)
        states = model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
        close(states[:1, real], alone)
        close(states[1:, 2:17], model(ids[1:, 2:17]).last_hidden_state)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"attention_mask": torch.ones(1, 8)}])
def test_a_text_begins_where_positions_go_on_by_more_than_one(options):
    """As in transformers, whose rule it is without a cache; seq_idx says otherwise."""
    model = attach_unverified(make_decoder("Llama"), "tisa", keep_absolute=False)
    ids, positions = torch.randint(3, 50, (1, 8)), torch.tensor([[0, 1, 2, 9, 10, 11, 12, 13]])
    alone = torch.cat([model(ids[:, :3]).last_hidden_state, model(ids[:, 3:]).last_hidden_state], 1)
    close(model(ids, position_ids=positions, **options).last_hidden_state, alone)
    one = model(ids, position_ids=positions, seq_idx=torch.zeros_like(ids), **options).last_hidden_state
    close(one, model(ids).last_hidden_state)


def test_with_none_a_model_keeps_its_own_result():
    """transformers mixes the texts if it keeps a cache, or beside a mask."""
    for way in WAYS:
        if way.startswith("position_ids"):
            model = make_decoder("Llama")
            _, row = packed(way)
            expected = model(**row).last_hidden_state
            close(attach_unverified(model, "none")(**row).last_hidden_state, expected)


@pytest.mark.parametrize("name", ["gpt_oss", "bert"])
def test_models_that_do_not_tell_texts_by_positions_refuse_them(name):
    model = make_bert(is_decoder=True) if name == "bert" else make(WINDOWED[name]())
    texts, row = packed("position_ids, with a cache")
    plain = model(**row).last_hidden_state
    close(attach_unverified(model, "none")(**row).last_hidden_state, plain)
    detach(model)
    attach_unverified(model, "tisa")
    advice = "pass cu_seq_lens_q or seq_idx, which show where texts begin, or put each text in its own row$"
    for mask in (None, torch.ones_like(row["input_ids"])):
        problem = "they start again within a row, but .* does not separate texts by them"
        with refused(rf"^position_ids: {problem}; {advice}"):
            model(**row, attention_mask=mask)
    alone = torch.cat([model(ids).last_hidden_state for ids in texts], 1)
    close(model(**row, seq_idx=DOCUMENTS).last_hidden_state, alone)


def test_texts_in_a_row_cannot_be_continued():
    model = attach_unverified(transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)).eval(), "tisa")
    _, row = packed("position_ids, with a cache")
    with refused(r"^position_ids: they start again within a row, but a cache continues one text; pass"):
        model.generate(**row, max_new_tokens=2)
    ids = row["input_ids"]
    mask = torch.ones_like(ids).index_fill(1, torch.arange(3), 0)
    padded = model.generate(ids, attention_mask=mask, max_new_tokens=3)[:, 15:]
    assert torch.equal(padded, model.generate(ids[:, 3:], max_new_tokens=3)[:, 12:])


def test_the_positions_of_text_beside_those_of_images_tell_texts():
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    sizes = {**GROUPED, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.Qwen2VLTextConfig(**sizes, rope_parameters=rotation)
    model = attach(transformers.Qwen2VLTextModel(config).eval(), "tisa")
    texts, row = packed("position_ids, with a cache")
    alone = torch.cat([model(ids).last_hidden_state for ids in texts], 1)
    row["position_ids"] = row["position_ids"].expand(4, 1, -1)
    close(model(**row).last_hidden_state, alone)


def test_texts_that_a_matrix_keeps_apart():
    """As a bool mask or as one that is added; methods that have to know where a text begins refuse it."""
    both = (DOCUMENTS[0, :, None] == DOCUMENTS)[None, None]
    visible, (texts, row) = both.tril(), packed("position_ids")
    ids, additive = row["input_ids"], torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    for position in ("logn", "fire", "rope+shaw"):
        decoder = attach_unverified(make_decoder("Llama"), position, keep_absolute=False)
        for model in (decoder, attach_unverified(make_bert(), position)):
            for mask in (visible, additive):
                with refused(r"^position: (Logn|Fire|Rope\+Shaw) counts positions from the start of a row"):
                    model(ids, attention_mask=mask)
    for model, shown, positions in ((make_decoder("Llama"), visible, None), (make_bert(), both, row["position_ids"])):
        attach_unverified(model, "tisa")
        alone = torch.cat([model(text).last_hidden_state for text in texts], 1)
        for mask in (shown, torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)):
            close(model(ids, attention_mask=mask, position_ids=positions).last_hidden_state, alone)


def test_ends_of_texts_that_do_not_fit_are_refused():
    model = attach_unverified(make_bert(), "tisa")
    ids = torch.randint(3, 50, (2, 15))
    for name, value, message in (
        ("cu_seq_lens_q", ENDS, "it needs one row and no cache, got 2 rows, 15 queries and 15 keys"),
        ("seq_idx", DOCUMENTS, r"it needs \(batch, n\) and no cache, got 2 rows"),
        ("cu_seq_lens_k", ENDS, "expected cu_seq_lens_q too, got None"),
    ):
        with pytest.raises(InputError, match=rf"^{name}: {message}"):
            model(ids, **{name: value})
    with pytest.raises(InputError, match=r"^cu_seq_lens_k: expected the numbers of cu_seq_lens_q, got tensor"):
        model(ids[:1], cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS[1:])


def test_models_that_drop_the_ends_of_texts_refuse_them():
    config = transformers.DebertaV2Config(**SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"])
    ids = torch.randint(3, 50, (1, 15))
    for head in ("Model", "ForMaskedLM"):
        model = attach(getattr(transformers, f"DebertaV2{head}")(config), "tisa")
        for name, value in (("cu_seq_lens_q", ENDS), ("cu_seq_lens_k", ENDS), ("seq_idx", DOCUMENTS)):
            with pytest.raises(InputError, match=rf"^{name}: a DeBERTa does not pass it on to its layers"):
                model(ids, **{name: value})
        # Where transformers' Trainer looks for the columns to keep.
        assert "token_type_ids" in inspect.signature(model.forward).parameters


@pytest.mark.parametrize("position", ["t5", "inkling"])
def test_a_method_for_causal_attention_refuses_a_matrix_that_shows_later_tokens(position):
    model = attach_unverified(make_decoder("Llama"), position)
    ids = torch.randint(3, 50, (1, 6))
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    prefix = causal.clone()
    prefix[..., :3, :3] = True
    close(model(ids, attention_mask=causal)[0], model(ids)[0])
    with pytest.raises(InputError, match=r"^attention_mask: it lets queries see later tokens, but \w+ was built"):
        model(ids, attention_mask=prefix)
    attach_unverified(make_decoder("Llama"), "rope", keep_absolute=False)(ids, attention_mask=prefix)


def test_a_second_rotation_is_refused():
    model = make_decoder("Llama")
    for position in ("rope", "rope+tisa", "rope/none/none"):
        with refused(rf"^position: .* and '{re.escape(position)}' would rotate them again; 'none' k"):
            attach_unverified(model, position)
    attach_unverified(make_bert(), "rope")
    attach_unverified(model, "rope", keep_absolute=False)
