"""Heads: the formulas of their logits and losses, and that they are well-behaved Hugging Face models."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional

from tests.models.test_encoder import batch, small_config
from whereformer import (
    Encoder,
    EncoderForCausalLM,
    EncoderForMaskedLM,
    EncoderForPreTraining,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
    load_pretrained,
)

# The batch has 3 rows of 9 tokens, of which the first row's last 3 are padding.
MODELS = {
    EncoderForSequenceClassification: (
        transformers.AutoModelForSequenceClassification,
        {"labels": torch.tensor([2, 0, 1])},
    ),
    EncoderForTokenClassification: (
        transformers.AutoModelForTokenClassification,
        {"labels": torch.arange(27).reshape(3, 9) % 3},
    ),
    EncoderForPreTraining: (transformers.AutoModelForPreTraining, {"labels": torch.arange(27).reshape(3, 9) % 2}),
}
PER_TOKEN = [EncoderForTokenClassification, EncoderForPreTraining]
every_model = pytest.mark.parametrize("model_class", MODELS)


def build(model_class, **changes):
    return model_class(small_config(**{"num_labels": 3, "position": "tisa", **changes})).eval()


def hidden_states(model, inputs):
    return model.encoder(**inputs).last_hidden_state


def predictions(output):
    """The logits, whatever they are called."""
    return [value for name, value in output.items() if "logits" in name]


@every_model
def test_predictions_are_those_written_out(model_class):
    """The first token's, or every token's, by one layer or two."""
    model, inputs = build(model_class), batch()
    hidden = hidden_states(model, inputs)
    *inner, weight, bias = (tensor for name, tensor in model.named_parameters() if not name.startswith("encoder."))
    if model_class is EncoderForSequenceClassification:
        hidden = torch.tanh(functional.linear(hidden[:, 0], *inner))
    elif model_class is EncoderForPreTraining:
        hidden = functional.gelu(functional.linear(hidden, *inner))
    logits = torch.stack(predictions(model(**inputs)), -1).squeeze(-1)
    torch.testing.assert_close(logits, functional.linear(hidden, weight, bias).squeeze(-1))


@every_model
def test_without_biases_only_the_last_layer_of_a_head_may_have_one(model_class):
    model = build(model_class, biases=False)
    assert sum(name.endswith("bias") for name, _ in model.named_parameters() if not name.startswith("encoder.")) <= 1


def test_documents_are_in_order_row_by_row_and_padding_is_none():
    model = build(EncoderForSequenceClassification)
    ids = torch.randint(1, 50, (2, 7))
    documents = torch.tensor([[5, 5, 5, 2, 2, 9, 9], [1, 1, 1, 1, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 0, 1, 2]])
    logits = model(ids, attention_mask=mask, position_ids=positions, document_ids=documents).logits
    alone = [ids[:1, :3], ids[:1, 3:5], ids[:1, 5:], ids[1:, :4]]
    torch.testing.assert_close(logits, torch.cat([model(part).logits for part in alone]), rtol=1e-4, atol=1e-6)


def cross_entropy(logits, labels):
    known = labels != -100
    return -logits[known].softmax(-1).gather(-1, labels[known].unsqueeze(-1)).log().mean()


def squared_error(logits, labels):
    return ((logits - labels.view_as(logits)) ** 2).mean()


def binary_cross_entropy(logits, labels):
    return -functional.logsigmoid((2 * labels - 1) * logits).mean()


ONE_CLASS, CLASSES = torch.tensor([2, 0, -100]), torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]])
NUMBERS = torch.tensor([1.5, -2.0, 0.0])
OF_TOKENS = torch.full((3, 9), -100)
OF_TOKENS[0, 0], OF_TOKENS[2, 8] = 1, 2


@pytest.mark.parametrize(
    ("changes", "labels", "expected"),
    [
        ({}, ONE_CLASS, cross_entropy),
        ({"problem_type": "single_label_classification"}, ONE_CLASS, cross_entropy),
        ({"num_labels": 1}, NUMBERS, squared_error),
        ({"num_labels": 1}, NUMBERS[:, None], squared_error),
        ({"problem_type": "regression"}, NUMBERS * CLASSES, squared_error),
        ({}, CLASSES.float(), binary_cross_entropy),
        ({"problem_type": "multi_label_classification"}, CLASSES.float(), binary_cross_entropy),
        ({"problem_type": "multi_label_classification"}, CLASSES, binary_cross_entropy),
        ({}, OF_TOKENS, cross_entropy),
    ],
)
def test_the_loss_is_that_of_the_labels(changes, labels, expected):
    model = build(EncoderForTokenClassification if labels is OF_TOKENS else EncoderForSequenceClassification, **changes)
    out = model(**batch(), labels=labels)
    assert model.config.problem_type == changes.get("problem_type")  # inferring it anew is what a label asks for
    torch.testing.assert_close(out.loss, expected(out.logits, labels))


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_of_the_discriminator_is_over_real_tokens_and_one_means_original(masked):
    model = build(EncoderForPreTraining)
    inputs = batch()
    real = inputs["attention_mask"].bool()
    if not masked:
        del inputs["attention_mask"]
        real = torch.ones_like(real)
    labels = MODELS[EncoderForPreTraining][1]["labels"]
    out = model(**inputs, labels=labels)
    chance_of_original = out.logits.sigmoid()
    chance_of_label = torch.where(labels == 1, chance_of_original, 1 - chance_of_original)
    torch.testing.assert_close(out.loss, -chance_of_label[real].log().mean())
    labels = torch.where(real, labels, 1 - labels)
    assert torch.equal(model(**inputs, labels=labels).loss, out.loss)


@every_model
def test_a_tuple_has_the_same_values(model_class):
    model, (_, labels) = build(model_class), MODELS[model_class]
    options = {**batch(), **labels, "output_hidden_states": True, "output_attentions": True}
    out = model(**options)
    as_tuple = model(**options, return_dict=False)
    assert len(out.hidden_states) == 3
    assert out.attentions[0].shape == (3, 2, 9, 9)
    assert torch.equal(as_tuple[0], out.loss)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(as_tuple[1:], predictions(out), strict=False))
    assert as_tuple[-1][0].shape == (3, 2, 9, 9)


@pytest.mark.parametrize(
    ("model_class", "auto_class", "changes"),
    [
        *((model_class, auto_class, {"embedding_size": 8}) for model_class, (auto_class, _) in MODELS.items()),
        (EncoderForMaskedLM, transformers.AutoModelForMaskedLM, {"lm_head": "tied", "windows": "2,3"}),
        (EncoderForCausalLM, transformers.AutoModelForCausalLM, {"causal": True}),
    ],
)
def test_saving_and_loading_changes_nothing(model_class, auto_class, changes, tmp_path):
    model = build(model_class, blocks="1x2", **changes)
    model.save_pretrained(tmp_path)
    assert type(load_pretrained(tmp_path)) is model_class
    loaded, loading_info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is model_class
    assert not any(loading_info.values())
    weights = model.state_dict()
    assert loaded.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in loaded.state_dict().items())
    assert all(getattr(loaded.config, name) == value for name, value in changes.items())
    inputs = batch()
    # Memory may lie differently, and a product with a single vector then rounds differently.
    for ours, theirs in zip(predictions(loaded.eval()(**inputs)), predictions(model(**inputs)), strict=True):
        torch.testing.assert_close(ours, theirs)


@every_model
def test_every_parameter_has_a_gradient(model_class):
    model, (_, labels) = build(model_class).train(), MODELS[model_class]
    model(**batch(), **labels).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        # A key's bias moves all scores of a query alike.
        assert parameter.grad.abs().max() > 0 or name.endswith("key.bias"), name


@every_model
def test_bfloat16_runs_with_a_loss_in_float32(model_class):
    model, (_, labels) = build(model_class), MODELS[model_class]
    expected = model(**batch(), **labels)
    out = model.bfloat16()(**batch(), **labels)
    assert all(logits.dtype == torch.bfloat16 for logits in predictions(out))
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.loss, expected.loss, rtol=0.05, atol=0.05)


@every_model
def test_from_a_masked_lm_only_the_head_is_new(model_class, tmp_path):
    """No head takes another's weights for its own, and loading says which are new and which not used."""
    source = EncoderForMaskedLM(small_config(position="tisa")).eval()
    source.save_pretrained(tmp_path)
    model, loading_info = model_class.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert set(loading_info["missing_keys"]) == {
        name for name, _ in model.named_parameters() if not name.startswith("encoder.")
    }
    assert set(loading_info["unexpected_keys"]) == {
        name for name in load_file(tmp_path / "model.safetensors") if "head" in name
    }
    assert not loading_info["mismatched_keys"]
    inputs = batch()
    assert torch.equal(hidden_states(model.eval(), inputs), hidden_states(source, inputs))


@pytest.mark.parametrize("source_class", MODELS)
@every_model
def test_no_head_takes_the_weights_of_another(source_class, model_class, tmp_path):
    build(source_class).save_pretrained(tmp_path)
    loading_info = model_class.from_pretrained(tmp_path, output_loading_info=True)[1]
    assert bool(loading_info["missing_keys"]) == (source_class is not model_class)
    assert not loading_info["mismatched_keys"]


@pytest.mark.parametrize("source_class", [Encoder, EncoderForPreTraining])
def test_a_sequence_is_classified_without_the_decoder(source_class, tmp_path):
    source = source_class(small_config(position="tisa", blocks="1-1", decoder_layers="2"))
    source.save_pretrained(tmp_path)
    model, loading_info = EncoderForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert len(model.encoder.layers) == 2
    assert all(name.startswith("classifier.") for name in loading_info["missing_keys"])
    assert all(name.startswith("discriminator_head.") for name in loading_info["unexpected_keys"])
    assert not loading_info["mismatched_keys"]
    model.save_pretrained(tmp_path / "tuned")
    loading_info = EncoderForSequenceClassification.from_pretrained(tmp_path / "tuned", output_loading_info=True)[1]
    assert not any(loading_info.values())


@pytest.mark.parametrize("position", ["tisa", "floater", "learned"])
def test_a_decoder_that_was_left_out_never_comes_back_untrained(position, tmp_path):
    config = small_config(position=position, blocks="1-1", decoder_layers="2")
    for model in (EncoderForSequenceClassification(config).eval(), Encoder(config.without_decoder()).eval()):
        assert config.with_decoder
        model.save_pretrained(tmp_path)
        loaded, loading_info = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
        assert not loading_info["missing_keys"]
        assert not loaded.has_decoder
        expected = model(**batch(), output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(loaded.eval()(**batch()).last_hidden_state, expected)
        with pytest.raises(ValueError, match="with_decoder: a prediction for every token needs a decoder"):
            EncoderForTokenClassification.from_pretrained(tmp_path)
        fresh, loading_info = Encoder.from_pretrained(tmp_path, with_decoder=True, output_loading_info=True)
        assert fresh.has_decoder
        assert all(name.startswith(("layers.2.", "layers.3.")) for name in loading_info["missing_keys"])


@pytest.mark.parametrize("model_class", PER_TOKEN)
def test_tokens_that_truncation_drops_are_predicted_too(model_class):
    model = build(model_class, blocks="1-1-1", decoder_layers="1")
    for logits in predictions(model(**batch())):
        assert logits.shape[:2] == (3, 9)
        assert torch.isfinite(logits).all()


@pytest.mark.parametrize("model_class", PER_TOKEN)
def test_predictions_for_every_token_need_a_decoder_after_pooling(model_class):
    with pytest.raises(ValueError, match=r"decoder_layers: .* got '2-2'"):
        build(model_class, blocks="2-2")


@pytest.mark.parametrize(
    ("model_class", "changes", "labels", "message"),
    [
        (EncoderForSequenceClassification, {}, {"labels": torch.ones(3, 3).long()}, r"labels: .* \(3,\) for single"),
        (EncoderForSequenceClassification, {}, {"labels": torch.ones(2).long()}, r"labels: .* \(3,\) .*got \(2,\)"),
        (EncoderForSequenceClassification, {}, {"labels": torch.ones(3)}, r"labels: .* \(3, 3\) for multi_label"),
        (EncoderForSequenceClassification, {"num_labels": 1}, {"labels": torch.ones(3, 2)}, r"\(3, 1\) for regression"),
        (EncoderForTokenClassification, {}, {"labels": torch.ones(3, 8).long()}, r"labels: .*\(3, 9\), got \(3, 8\)"),
        (EncoderForPreTraining, {}, {"labels": torch.ones(3).long()}, r"labels: .*\(3, 9\), got \(3,\)"),
    ],
)
def test_bad_labels_are_named(model_class, changes, labels, message):
    with pytest.raises(ValueError, match=message):
        build(model_class, **changes)(**batch(), **labels)


def test_a_tied_head_is_the_embeddings_and_a_bias():
    model = EncoderForMaskedLM(small_config(lm_head="tied")).eval()
    torch.nn.init.normal_(model.head.decoder.bias)
    inputs = batch()
    expected = hidden_states(model, inputs) @ model.encoder.embeddings.word.weight.T + model.head.decoder.bias
    torch.testing.assert_close(model(**inputs).logits, expected)
    assert {name for name, _ in model.head.named_parameters()} == {"decoder.weight", "decoder.bias"}


def test_a_tied_head_needs_embeddings_as_wide_as_the_hidden_states():
    with pytest.raises(ValueError, match=r"lm_head: 'tied' needs .* hidden_size 16 and embedding_size 8"):
        EncoderForMaskedLM(small_config(lm_head="tied", embedding_size=8))
