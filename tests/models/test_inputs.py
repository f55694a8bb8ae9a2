"""The inputs of models: names that transformers can see and no others."""

import inspect

import pytest
import torch
import transformers

from tests.models.test_encoder import small_config
from tests.models.test_seq2seq import config_of
from whereformer import Electra, ElectraPretrainingConfig, Encoder, Seq2SeqForConditionalGeneration
from whereformer.models import heads

TOKENS = {
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "document_ids", "return_dict"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
}
ENCODER = TOKENS | {"inputs_embeds", "output_hidden_states", "output_attentions", "use_cache"}
NAMES = {
    Encoder: ENCODER,
    heads.EncoderForMaskedLM: ENCODER | {"labels"},
    heads.EncoderForPreTraining: ENCODER | {"labels"},
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
    with pytest.raises(TypeError, match=f"^atention_mask: not an argument of {kind.__name__}, which accepts input_"):
        build(kind)(input_ids=torch.ones(1, 3, dtype=torch.long), atention_mask=torch.ones(1, 3))


IDS = torch.tensor([[3, 4, 5]])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (([[1, 2]],), r"input_ids: expected a tensor, got \[\[1, 2\]\]; torch.tensor\(input_ids\)"),
        ((["a text"],), r"input_ids: expected a tensor, got \['a text'\]; tokenizer\(text, "),
        (({"input_ids": IDS},), r"input_ids: expected a tensor, got dict; write model\(\*\*batch\)"),
        ((IDS, [[1, 1, 1]]), r"attention_mask: expected a tensor, got "),
        ((IDS + 1000,), r"input_ids: expected integers from 0 to \d+, got 1005$"),
        ((IDS - 9,), r"input_ids: expected integers from 0 to \d+, got -4$"),
        ((IDS, None, {"token_type_ids": IDS}), r"token_type_ids: expected integers from 0 to 1, got 5$"),
        ((IDS, None, {"labels": [1]}), r"labels: expected a tensor, got \[1\]; "),
        ((IDS, None, {"labels": torch.tensor([2])}), r"labels: expected integers from 0 to 1, got 2$"),
        ((IDS, None, {"labels": torch.tensor([-1])}), r"labels: expected integers from 0 to 1, got -1$"),
    ],
)
def test_inputs_that_do_not_fit_are_named(inputs, message):
    *tensors, options = inputs if isinstance(inputs[-1], dict) and len(inputs) > 1 else (*inputs, {})
    with pytest.raises(ValueError, match=f"^{message}"):
        build(heads.EncoderForSequenceClassification)(*tensors, **options)


def test_checkpoints_of_transformers_and_text_have_other_ways(tmp_path):
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^model_type: .* 'bert'; whereformer.load_pretrained\(path\) reads it$"):
        Encoder.from_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match=r"^generate: EncoderForCausalLM has no cache"):
        language_model(heads.EncoderForCausalLM).generate(IDS)


def test_the_trainer_keeps_the_columns_that_a_model_takes(tmp_path):
    datasets = pytest.importorskip("datasets")
    columns = {"input_ids": [[1, 2, 3]], "token_type_ids": [[0, 0, 1]], "position_ids": [[0, 1, 2]], "labels": [0]}
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = transformers.Trainer(build(heads.EncoderForSequenceClassification), arguments)
    dataset = trainer._remove_unused_columns(datasets.Dataset.from_dict({**columns, "sentence": ["a b c"]}))
    assert set(dataset.column_names) == columns.keys()
    assert trainer.label_names == ["labels"]


def test_a_tuple_where_the_configuration_says_so():
    model = language_model(heads.EncoderForMaskedLM)
    ids = torch.ones(1, 3, dtype=torch.long)
    model.config.return_dict = False
    output = model(ids, labels=ids)
    assert type(output) is tuple
    assert len(output) == 2
    as_dict = model(ids, labels=ids, return_dict=True)
    assert torch.equal(as_dict.loss, output[0])


def language_model(kind):
    return kind(small_config(vocab_size=50, hidden_size=16, causal=kind is heads.EncoderForCausalLM)).eval()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("kind", [heads.EncoderForMaskedLM, heads.EncoderForCausalLM, Seq2SeqForConditionalGeneration])
def test_labels_of_any_whole_numbers(kind, dtype):
    model = build(kind).eval() if kind is Seq2SeqForConditionalGeneration else language_model(kind)
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    assert torch.equal(model(ids, labels=ids.to(dtype)).loss, model(ids, labels=ids).loss)
