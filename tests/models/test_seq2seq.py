"""The translation Transformer: transformers' own numbers, steps of generation, padding, losses, files."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForSeq2SeqLM, DynamicCache, MarianConfig, MarianMTModel

from whereformer import PositionRangeError, Seq2SeqConfig, Seq2SeqForConditionalGeneration, position_names
from whereformer.models.inputs import CACHE

from .checkpointing import checkpoint_activations
from .peers import of_both_stacks

METHODS = [*position_names(), "learned+tisa", "tupe+t5", "sinusoidal+floater", "rope+fox", "deberta+rope"]
VOCABULARY = 40


def config_of(position="sinusoidal", **changes):
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "max_position_embeddings": 24,
        "hidden_dropout_prob": 0.0,
    }
    return Seq2SeqConfig(**{**sizes, "position": position, **changes})


def build(position="sinusoidal", dtype=torch.float64, **changes):
    """A model in evaluation whose positional parameters are far from what they begin as."""
    model = Seq2SeqForConditionalGeneration(config_of(position, **changes)).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens(*shape):
    return torch.randint(3, VOCABULARY, shape)


def read(model, source, mask):
    return {"encoder_outputs": model.encoder(source, mask), "attention_mask": mask}


def marian():
    """Transformers' model of the same shape, its sinusoids replaced by tables of any numbers, as learned ones are."""
    config = MarianConfig(
        **of_both_stacks(layers=2, attention_heads=4, ffn_dim=48),
        vocab_size=VOCABULARY,
        d_model=32,
        activation_function="relu",
        max_position_embeddings=24,
        scale_embedding=True,
        dropout=0.0,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=1,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )
    theirs = MarianMTModel(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return theirs


NAMES = {
    "self_attn.": "attention.",
    "encoder_attn.": "cross.",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "out",
    "self_attn_layer_norm": "attention_norm",
    "encoder_attn_layer_norm": "cross_norm",
    "final_layer_norm": "feed_forward_norm",
    "fc1": "up",
    "fc2": "down",
    "embed_positions.weight": "position.weight",
}


def ours_of(theirs):
    ours = build("learned", layer_norm_eps=1e-5)
    state = {"words.weight": theirs.model.shared.weight}
    for name, tensor in theirs.model.named_parameters():
        if name.startswith(("encoder.", "decoder.")) and "embed_tokens" not in name:
            for old, new in NAMES.items():
                name = name.replace(old, new)
            state[name] = tensor
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) == {"encoder.words.weight", "decoder.words.weight", "head.weight"}
    with torch.no_grad():
        theirs.final_logits_bias.zero_()
    return ours


def test_logits_states_and_gradients_equal_marians():
    theirs = marian()
    ours = ours_of(theirs)
    source, target = tokens(3, 7), tokens(3, 5)
    mask = torch.ones_like(source)
    mask[1, 4:] = 0
    target[2, 3:] = -100
    actual, expected = (model(source, mask, labels=target, output_hidden_states=True) for model in (ours, theirs))
    # What follows the end is predicted from padding, whose embedding transformers leaves as it is.
    real = target != -100
    torch.testing.assert_close(actual.logits[real], expected.logits[real], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual.loss.double(), expected.loss, rtol=1e-6, atol=0)
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        token_mask = mask.bool() if name.startswith("encoder") else real
        for state, expected_state in zip(getattr(actual, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(state[token_mask], expected_state[token_mask], rtol=1e-12, atol=1e-12)
    actual.logits[real].square().sum().backward()
    expected.logits[real].square().sum().backward()
    torch.testing.assert_close(ours.words.weight.grad[1:], theirs.model.shared.weight.grad[1:], rtol=1e-9, atol=1e-9)
    grad = ours.decoder.layers[0].cross.query.weight.grad
    torch.testing.assert_close(grad, theirs.model.decoder.layers[0].encoder_attn.q_proj.weight.grad)


@pytest.mark.parametrize("position", METHODS)
@pytest.mark.parametrize("norm", ["post", pytest.param("pre", marks=pytest.mark.slow)])
def test_every_step_with_a_cache_has_the_logits_of_the_whole(position, norm):
    model = build(position, norm=norm)
    source, target = tokens(3, 7), tokens(3, 9)
    mask = torch.ones_like(source)
    mask[1, 5:] = 0
    with torch.no_grad():
        expected = model(source, mask, target, use_cache=False).logits
        encoded, cache, logits = read(model, source, mask), None, []
        # One at a time, then several at once.
        for new in target.split([1, 1, 1, 3, 1, 2], 1):
            output = model(**encoded, decoder_input_ids=new, **{CACHE: cache}, use_cache=True)
            cache = output[CACHE]
            logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-11, atol=1e-11)


@torch.no_grad()
def test_keys_of_the_source_are_computed_once_and_never_copied():
    model = build("shaw")
    cross, lengths, stored = model.decoder.layers[0].cross, [], []
    cross.key.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    encoded, cache = read(model, tokens(3, 7), None), None
    for new in tokens(3, 4).split(1, 1):
        cache = model(**encoded, decoder_input_ids=new, **{CACHE: cache}, use_cache=True)[CACHE]
        stored.append(cache.cross_attention_cache.layers[0].keys)
    assert lengths == [7]
    assert all(keys is stored[0] for keys in stored)


@pytest.mark.parametrize(
    "position",
    [
        name
        if name in ("none", "rope", "tisa", "transformer_xl", "learned")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in METHODS
    ],
)
def test_beams_with_a_cache_are_those_without(position):
    model = build(position)
    source = tokens(3, 6)
    mask = torch.ones_like(source)
    mask[0, 4:] = 0
    for options in ({}, {"num_beams": 3, "length_penalty": 0.6}):
        cached, uncached = (
            model.generate(source, attention_mask=mask, max_new_tokens=8, use_cache=use, **options)
            for use in (True, False)
        )
        assert torch.equal(cached, uncached)


@pytest.mark.parametrize("position", METHODS)
def test_padding_changes_nothing(position):
    """The target is longer than the source, so that its last tokens stand where the source has padding."""
    model = build(position)
    source, target = tokens(2, 5), tokens(2, 6)
    padded = functional.pad(source, (0, 3))
    mask = (padded != 0).long()
    with torch.no_grad():
        expected = model(source, None, target, use_cache=False).logits
        actual = model(padded, mask, functional.pad(target, (0, 2)), use_cache=False).logits
    torch.testing.assert_close(actual[:, :6], expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("position", METHODS)
def test_gradients_reach_the_positions_of_both_parts(position):
    model = build(position)
    model(tokens(2, 8), labels=tokens(2, 8)).loss.backward()
    for part in (model.encoder, model.decoder):
        for name, parameter in part.position.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
        assert not list(part.position.parameters()) or any(
            parameter.grad.abs().max() > 0 for parameter in part.position.parameters()
        )


@pytest.mark.parametrize("source_length", [1, 2, 9])
@pytest.mark.parametrize("target_length", [1, 2, 7])
def test_short_and_unequal_lengths(source_length, target_length):
    output = build("shaw")(tokens(2, source_length), labels=tokens(2, target_length))
    assert output.logits.shape == (2, target_length, VOCABULARY)
    assert output.loss.isfinite()


def test_the_loss_is_label_smoothed_in_training_only():
    model = build()
    source, labels = tokens(3, 5), tokens(3, 6)
    labels[1, 4:] = -100
    log_p = model(source, labels=labels).logits.log_softmax(-1)
    real = labels != -100
    nats = -log_p[real].gather(-1, labels[real].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(model(source, labels=labels).loss.double(), nats.mean(), rtol=1e-6, atol=0)
    smoothed = 0.9 * nats + 0.1 * -log_p[real].mean(-1)
    model.train()
    torch.testing.assert_close(model(source, labels=labels).loss.double(), smoothed.mean(), rtol=1e-6, atol=0)
    shared = model(source, labels=labels, num_items_in_batch=torch.tensor(50)).loss.double()
    torch.testing.assert_close(shared, smoothed.sum() / 50, rtol=1e-6, atol=0)


@pytest.mark.parametrize("labels", [torch.full((2, 4), -100), torch.empty(2, 0).long(), torch.empty(0, 4).long()])
@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)])
def test_the_loss_of_nothing_is_zero(labels, count):
    model = build().train()
    loss = model(tokens(len(labels), 5), labels=labels, num_items_in_batch=count).loss
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_targets_stand_one_place_to_the_right():
    model = build()
    labels = torch.tensor([[5, 6, 2], [7, 2, -100]])
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [[1, 5, 6], [1, 7, 2]]
    source = tokens(2, 4)
    output = model(source, decoder_input_ids=torch.tensor([[1, 5, 6], [1, 7, 2]]), labels=labels)
    torch.testing.assert_close(output.loss, model(source, labels=labels).loss)


def test_checkpointed_layers_have_no_cache():
    """In the backward, a layer that runs again would add its keys a second time."""
    model = build("shaw").train()
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint_activations(model)
        output = model(tokens(2, 5), labels=tokens(2, 6), use_cache=True)
        assert (getattr(output, CACHE) is None) == checkpointed


@pytest.mark.parametrize("position", ["sinusoidal", "shaw", "learned+tisa"])
def test_a_saved_model_is_the_same(position, tmp_path):
    model = build(position, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert isinstance(loaded, Seq2SeqForConditionalGeneration)
    assert loaded.words.weight is loaded.head.weight is loaded.encoder.words.weight is loaded.decoder.words.weight
    source, target = tokens(2, 5), tokens(2, 6)
    with torch.no_grad():
        expected, actual = (version(source, None, target).logits for version in (model, loaded))
    assert torch.equal(expected, actual)


def test_a_larger_vocabulary_stays_shared():
    model = build()
    model.resize_token_embeddings(VOCABULARY + 3)
    assert model.words.weight is model.head.weight is model.encoder.words.weight is model.decoder.words.weight
    assert model(tokens(1, 3), labels=torch.full((1, 2), VOCABULARY + 2)).logits.shape[-1] == VOCABULARY + 3


def test_weights_are_returned_for_all_three_attentions():
    output = build("shaw")(tokens(2, 5), decoder_input_ids=tokens(2, 6), output_attentions=True)
    shapes = [tuple(weights[0].shape) for weights in (output.encoder_attentions, output.decoder_attentions)]
    assert shapes == [(2, 4, 5, 5), (2, 4, 6, 6)]
    assert tuple(output.cross_attentions[1].shape) == (2, 4, 6, 5)
    assert (output.decoder_attentions[0].triu(1) == 0).all()
    total = output.cross_attentions[0].sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))


def test_writing_beyond_a_table_of_positions_says_so():
    with pytest.raises(PositionRangeError, match=r"covers positions 0 to 23 .* got position 24"):
        build("learned").generate(tokens(1, 3), max_new_tokens=30, min_new_tokens=30)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "both"}, r"norm: expected one of post, pre, got 'both'"),
        ({"num_attention_heads": 5}, "5 heads do not divide hidden_size 32"),
        ({"encoder_layers": 0}, "encoder_layers: expected 1 to 1000, got 0"),
        ({"label_smoothing": 1.0}, r"label_smoothing: expected 0 to 0.99, got 1.0"),
        ({"attention_probs_dropout_prob": 1.0}, r"attention_probs_dropout_prob: expected 0 to 0.99, got 1.0"),
        ({"hidden_act": "rleu"}, "hidden_act: expected one of .*, got 'rleu'"),
        ({"pad_token_id": 99}, r"pad_token_id: expected a token of the \d+, got 99"),
        ({"decoder_start_token_id": None}, r"decoder_start_token_id: expected a token of the \d+, got None"),
        ({"position": "tisaa"}, "unknown position method 'tisaa'; did you mean 'tisa'"),
    ],
)
def test_what_fits_no_model_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Seq2SeqForConditionalGeneration(config_of(**{"position": "tisa", **changes}))


def test_inputs_that_do_not_fit_are_named():
    model = build()
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(2, 5\), got \(2, 4\)"):
        model(tokens(2, 5), torch.ones(2, 4), tokens(2, 3))
    with pytest.raises(ValueError, match="decoder_input_ids and decoder_inputs_embeds: pass exactly one"):
        model(tokens(2, 5))
    with pytest.raises(ValueError, match=r"labels: expected shape \(2, 3\), got \(2, 4\)"):
        model(tokens(2, 5), decoder_input_ids=tokens(2, 3), labels=tokens(2, 4))
    with pytest.raises(ValueError, match=r"decoder_attention_mask: expected shape \(2, 3\), got \(2, 4\)"):
        model(tokens(2, 5), decoder_input_ids=tokens(2, 3), decoder_attention_mask=torch.ones(2, 4))
    first = model(tokens(2, 5), decoder_input_ids=tokens(2, 3), use_cache=True)
    with pytest.raises(ValueError, match=r"decoder_attention_mask: expected shape \(2, 4\), got \(2, 1\)"):
        model(
            tokens(2, 5),
            decoder_input_ids=tokens(2, 1),
            decoder_attention_mask=torch.ones(2, 1),
            **{CACHE: first[CACHE]},
        )
    with pytest.raises(ValueError, match="decoder_input_ids: expected a batch of 2 like the source, got 3"):
        model(tokens(2, 5), decoder_input_ids=tokens(3, 3))
    with pytest.raises(ValueError, match=r"^inputs_embeds: expected shape \(batch, n, 32\), got \(2, 5, 31\)"):
        model(inputs_embeds=torch.zeros(2, 5, 31), decoder_input_ids=tokens(2, 3))
    with pytest.raises(ValueError, match=rf"{CACHE}: expected an EncoderDecoderCache .*, got a DynamicCache"):
        model(tokens(2, 5), decoder_input_ids=tokens(2, 3), **{CACHE: DynamicCache()})
    with pytest.raises(ValueError, match=rf"{CACHE}: .* got a StaticCache"):
        model.generate(tokens(2, 5), cache_implementation="static", max_new_tokens=3)


def test_presets_have_the_papers_sizes():
    # Vaswani et al. (2017), Table 3: 65 and 213 million with a shared vocabulary of about 37000.
    for name, millions in (("base", 63), ("big", 214)):
        with torch.device("meta"):
            model = Seq2SeqForConditionalGeneration(Seq2SeqConfig.preset(name, vocab_size=37000))
        assert sum(parameter.numel() for parameter in model.parameters()) // 10**6 == millions
    with pytest.raises(ValueError, match="preset: expected one of base, big, small, got 'huge'"):
        Seq2SeqConfig.preset("huge")


def test_a_checkpoint_without_embeddings_is_not_complete(tmp_path):
    build(dtype=torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["words.weight"]
    save_file(weights, file, {"format": "pt"})
    model, loading_info = Seq2SeqForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert "words.weight" in loading_info["missing_keys"]
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.encoder.words.weight is model.decoder.words.weight is model.head.weight is model.words.weight
