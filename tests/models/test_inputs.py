"""The inputs of models: names that transformers can see and no others."""

import inspect
import math

import pytest
import torch
import transformers

from tests.models.test_encoder import small_config
from tests.models.test_seq2seq import config_of
from whereformer import Electra, ElectraPretrainingConfig, Encoder, Seq2SeqForConditionalGeneration
from whereformer.errors import InputError
from whereformer.models import heads

TOKENS = {
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "document_ids", "return_dict"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
}
ENCODER = TOKENS | {"inputs_embeds", "output_hidden_states", "output_attentions"}
NAMES = {
    Encoder: ENCODER,
    heads.EncoderForMaskedLM: ENCODER | {"labels"},
    heads.EncoderForPreTraining: ENCODER | {"labels"},
    heads.EncoderForQuestionAnswering: ENCODER | {"start_positions", "end_positions"},
    heads.EncoderForSequenceClassification: ENCODER | {"labels"},
    heads.EncoderForTokenClassification: ENCODER | {"labels"},
    Electra: TOKENS | {"labels", "sampled_ids", "uniforms"},
}


def build(kind):
    if kind is Seq2SeqForConditionalGeneration:
        return kind(config_of())
    sizes = {"hidden_size": 32, "num_attention_heads": 4}
    return kind(small_config(ElectraPretrainingConfig, **sizes) if kind is Electra else small_config())


@pytest.mark.parametrize("kind", NAMES)
def test_signatures_name_every_argument(kind):
    assert set(inspect.signature(build(kind).forward).parameters) == NAMES[kind]


@pytest.mark.parametrize("kind", [*NAMES, Seq2SeqForConditionalGeneration])
def test_other_arguments_are_refused_by_name(kind):
    with pytest.raises(TypeError, match=f"^atention_mask: no argument of {kind.__name__}, which takes input_ids, "):
        build(kind)(input_ids=torch.ones(1, 3, dtype=torch.long), atention_mask=torch.ones(1, 3))


def test_the_trainer_keeps_the_columns_that_a_model_takes(tmp_path):
    datasets = pytest.importorskip("datasets")
    columns = {"input_ids": [[1, 2, 3]], "token_type_ids": [[0, 0, 1]], "position_ids": [[0, 1, 2]], "labels": [0]}
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = transformers.Trainer(build(heads.EncoderForSequenceClassification), arguments)
    found = trainer._remove_unused_columns(datasets.Dataset.from_dict({**columns, "sentence": ["a b c"]}))
    assert set(found.column_names) == columns.keys()
    assert trainer.label_names == ["labels"]
    questions = transformers.Trainer(build(heads.EncoderForQuestionAnswering), arguments)
    assert questions.label_names == ["start_positions", "end_positions"]


def test_a_tuple_where_the_configuration_says_so():
    model = build(heads.EncoderForQuestionAnswering).eval()
    ids, place = torch.ones(1, 3, dtype=torch.long), torch.tensor([1])
    model.config.return_dict = False
    found = model(ids, start_positions=place, end_positions=place)
    assert type(found) is tuple
    assert len(found) == 3
    asked = model(ids, start_positions=place, end_positions=place, return_dict=True)
    assert torch.equal(asked.loss, found[0])


def test_token_types_and_positions_may_follow_the_mask_as_in_bert():
    model = build(heads.EncoderForMaskedLM).eval()
    ids, mask = torch.arange(12).reshape(2, 6), torch.ones(2, 6)
    types, places = torch.tensor([0, 0, 0, 1, 1, 1]).expand(2, -1), torch.arange(1, 7).expand(2, -1)
    by_name = model(ids, mask, token_type_ids=types, position_ids=places).logits
    assert torch.equal(model(ids, mask, types, places).logits, by_name)
    assert not torch.equal(model(ids, mask).logits, by_name)
    with pytest.raises(TypeError, match="token_type_ids: given twice"):
        model(ids, mask, types, token_type_ids=types)
    with pytest.raises(TypeError, match="positional"):
        model(ids, mask, types, places, None)


@pytest.mark.parametrize("position", ["sinusoidal", "shaw", "rope", "tisa", "learned", "learned+t5"])
@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (2**63 - 1, torch.int64),
        (-(2**63), torch.int64),
        (2**31, torch.int64),
        (2**64 - 1, torch.uint64),
        (3e38, torch.float32),
        (math.inf, torch.float64),
        (math.nan, torch.float32),
    ],
)
def test_positions_beyond_any_text_are_refused(position, number, dtype):
    model = Encoder(small_config(position=position)).eval()
    positions = torch.tensor([0, number, 1], dtype=dtype)
    with pytest.raises(
        InputError, match=r"^position_ids: expected numbers from -2147483647 to 2147483647, got"
    ) as caught:
        model(torch.ones(2, 3, dtype=torch.long), position_ids=positions)
    assert len(str(caught.value)) < 100


def test_the_largest_position_is_taken_and_offsets_are_exact():
    model = Encoder(small_config(position="shaw")).eval()
    ids = torch.randint(1, 20, (2, 5))
    with torch.no_grad():
        near = model(ids, position_ids=torch.arange(5)).last_hidden_state
        far = model(ids, position_ids=torch.arange(5) + 2**31 - 5).last_hidden_state
    torch.testing.assert_close(far, near, rtol=0, atol=0)
    assert model(ids[:, :0], position_ids=torch.arange(0)).last_hidden_state.shape == (2, 0, near.shape[2])


STRANGE = {
    "list": ([[3, 4, 5]] * 2, "expected a tensor, got list"),
    "array": (torch.ones(2, 3).long().numpy(), "expected a tensor, got ndarray"),
    "number": (3, "expected a tensor, got int"),
}
IDS = {
    "floats": (torch.ones(2, 3), "expected int64 or int32, got torch.float32"),
    "too large": (torch.tensor([[3, 4, 50]] * 2), "expected numbers that the model has embeddings for, got 3 to 50"),
    "negative": (torch.tensor([[-1, 4, 5]] * 2), "expected numbers that the model has embeddings for, got -1 to 5"),
}
EMBEDDED = {
    "narrow": (torch.randn(2, 3, 8), r"expected shape \(batch, n, 16\), got \(2, 3, 8\)"),
    "one state": (torch.randn(2, 16), r"expected shape \(batch, n, 16\), got \(2, 16\)"),
    "whole": (torch.ones(2, 3, 16).long(), "expected floating-point numbers, got torch.int64"),
}
LABELS = {
    "floats": (torch.ones(2, 3), "expected whole numbers, got torch.float32"),
    "too large": (torch.tensor([[3, 4, 50]] * 2), "expected numbers from 0 to 49, or -100, got 50"),
    "negative": (torch.tensor([[3, 4, -1]] * 2), "expected numbers from 0 to 49, or -100, got -1"),
}


def language_model(kind):
    return kind(small_config(vocab_size=50, hidden_size=16, causal=kind is heads.EncoderForCausalLM)).eval()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        pytest.param(name, *case, id=f"{name} {kind}")
        for name, more in (
            ("input_ids", IDS),
            ("token_type_ids", IDS),
            ("attention_mask", {}),
            ("position_ids", {}),
            ("document_ids", {"floats": LABELS["floats"]}),
            ("inputs_embeds", EMBEDDED),
            ("labels", LABELS),
        )
        for kind, case in (STRANGE | more).items()
    ],
)
@pytest.mark.parametrize("kind", [heads.EncoderForMaskedLM, heads.EncoderForCausalLM])
def test_strange_inputs_are_refused_by_name(kind, name, value, message):
    model = language_model(kind)
    given = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]]), name: value}
    if name == "inputs_embeds":
        del given["input_ids"]
    with pytest.raises(InputError, match=f"^{name}: {message}"):
        model(**given)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("kind", [heads.EncoderForMaskedLM, heads.EncoderForCausalLM, Seq2SeqForConditionalGeneration])
def test_labels_of_any_whole_numbers(kind, dtype):
    model = build(kind).eval() if kind is Seq2SeqForConditionalGeneration else language_model(kind)
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    assert torch.equal(model(ids, labels=ids.to(dtype)).loss, model(ids, labels=ids).loss)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("decoder_input_ids", torch.tensor([[3, 50]] * 2), "expected numbers that the model has embeddings for"),
        ("decoder_input_ids", [[3, 4]] * 2, "expected a tensor, got list"),
        ("decoder_inputs_embeds", torch.randn(2, 3, 8), r"expected shape \(batch, n, 32\)"),
        ("decoder_attention_mask", [[1, 1]] * 2, "expected a tensor, got list"),
        ("encoder_outputs", "states", "expected the encoder's output, got str"),
        ("encoder_outputs", ([[1.0]],), "expected a tensor, got list"),
        ("labels", torch.tensor([[3, 50]] * 2), "expected numbers from 0 to 39, or -100, got 50"),
        ("labels", torch.ones(2, 2), "expected whole numbers, got torch.float32"),
        ("labels", torch.tensor([3, 4]), r"expected shape \(batch, n\), got \(2,\)"),
        ("labels", [[3, 4]] * 2, "expected a tensor, got list"),
    ],
)
def test_strange_targets_are_refused_by_name(name, value, message):
    model = build(Seq2SeqForConditionalGeneration)
    given = {"input_ids": torch.tensor([[3, 4], [6, 7]]), "decoder_input_ids": torch.tensor([[3, 4], [6, 7]])}
    if name in ("decoder_inputs_embeds", "labels"):
        del given["decoder_input_ids"]
    with pytest.raises(InputError, match=f"^{name}: {message}"):
        model(**{**given, name: value})


def test_the_first_label_of_a_causal_model_is_not_looked_at():
    model = language_model(heads.EncoderForCausalLM)
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    labels = ids.clone()
    labels[:, 0] = -1
    assert torch.equal(model(ids, labels=labels).loss, model(ids, labels=ids).loss)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"start_positions": torch.ones(2)}, "start_positions: expected whole numbers, got torch.float32"),
        ({"end_positions": torch.ones(2).bool()}, "end_positions: expected whole numbers, got torch.bool"),
        ({"input_ids": [[3, 4, 5]] * 2}, "input_ids: expected a tensor, got list"),
    ],
)
def test_strange_answers_are_refused_by_name(given, message):
    model = build(heads.EncoderForQuestionAnswering).eval()
    right = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]])}
    right |= dict.fromkeys(("start_positions", "end_positions"), torch.tensor([0, 2], dtype=torch.int32))
    assert torch.isfinite(model(**right).loss)
    with pytest.raises(InputError, match=f"^{message}"):
        model(**{**right, **given})
