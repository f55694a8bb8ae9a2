"""The causal language model: nothing leaks from the future, and the loss is that of the next token."""

import pytest
import torch
import transformers
from torch.nn import functional

import whereformer
from whereformer import EncoderForCausalLM, EncoderForMaskedLM, EncoderForSequenceClassification
from whereformer.models import checks, encoder
from whereformer.models.config import PRESETS
from whereformer.positions import visible_keys

from .peers import enlarge, refused
from .test_encoder import small_config

SYNTHESIZERS = [
    {"position": "synthesizer", "position_options": {"variant": variant, "content": content}}
    for variant in ("random", "factorized_random", "dense", "factorized_dense")
    for content in ("none", "mix")
]
METHODS = [
    *({"position": name} for name in [*whereformer.position_names(), "learned+tisa", "tupe+t5", "rope+alibi"]),
    *SYNTHESIZERS,
    {"position": "transformer_xl", "separate_cls": False},
    {**PRESETS["modernbert"], "windows": "0,3", "position_options": {"base": [100.0, 10.0]}},
]


def build(kind=EncoderForCausalLM, **options):
    torch.manual_seed(0)
    return enlarge(kind(small_config(**{"max_position_embeddings": 16, "causal": True, **options})).double())


@pytest.mark.parametrize("options", METHODS, ids=str)
@pytest.mark.parametrize("backend", ["auto", pytest.param("blockwise", marks=pytest.mark.slow)])
def test_no_state_depends_on_later_tokens(options, backend):
    model = build(**{**options, "attention_backend": backend})
    ids = torch.randint(1, 50, (1, 12))
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    for token in (0, 1, 5, 11):
        (gradient,) = torch.autograd.grad(logits[0, token].square().sum(), embedded, retain_graph=True)
        assert not gradient[0, token + 1 :].any()
        assert gradient[0, token].any()


def test_the_loss_is_the_cross_entropy_of_the_next_token():
    model = build(position="t5")
    ids = torch.randint(1, 50, (3, 9))
    labels = ids.clone()
    labels[0, 4:] = -100
    out = model(ids, labels=labels)
    assert out.logits.shape == (3, 9, 50)
    chances = out.logits.log_softmax(-1)
    by_hand = [
        -chances[row, token, labels[row, token + 1]]
        for row in range(3)
        for token in range(8)
        if labels[row, token + 1] != -100
    ]
    assert float(out.loss.detach()) == pytest.approx(float(torch.stack(by_hand).mean().detach()), rel=1e-6)
    theirs = transformers.loss.loss_utils.ForCausalLMLoss(out.logits, labels, vocab_size=50)
    torch.testing.assert_close(out.loss, theirs, rtol=1e-6, atol=0)
    model.config.sparse_prediction = True
    sparse = model(ids, labels=labels)
    assert sparse.logits.shape == (len(by_hand), 50)
    torch.testing.assert_close(sparse.loss, out.loss, rtol=1e-6, atol=0)
    assert model(ids[:, :1], labels=ids[:, :1]).loss.isnan()  # there is no next token


@pytest.mark.parametrize("with_ids", [True, False])
def test_packed_documents_do_not_predict_each_other(with_ids):
    """Without their ids, positions that begin again tell them, as in transformers."""
    model = build(position="rope", sparse_prediction=True)
    rows = [torch.randint(1, 50, (1, length)) for length in (4, 1, 6)]
    packed = torch.cat(rows, 1)
    documents = torch.tensor([[0] * 4 + [1] + [2] * 6])
    position_ids = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    output = model(packed, labels=packed, document_ids=documents if with_ids else None, position_ids=position_ids)
    alone = torch.cat([model(row, labels=row).logits for row in rows])
    torch.testing.assert_close(output.logits, alone, rtol=1e-9, atol=1e-10)
    targets = torch.cat([row[0, 1:] for row in rows])
    torch.testing.assert_close(output.loss, functional.cross_entropy(alone.float(), targets), rtol=1e-5, atol=0)


LENGTHS = (4, 1, 6)
MASKS = {
    "ones": [1] * 11,
    "padding on both sides": [0, 0, *[1] * 11, 0],
    "padding between and within": [1, 1, 0, 1, 1, 0, 1, 0, 0, *[1] * 6],
}


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("position", ["none", "tisa", "shaw", "rope", "fire"])
def test_positions_tell_documents_beside_a_mask(position, case, dtype, looks, monkeypatch):
    """A mask of ones says nothing, and one of padding nothing of the tokens that it shows; on a GPU nobody looks."""
    for module in (encoder, checks, visible_keys):
        monkeypatch.setattr(module, "can_read", lambda tensor: looks)
    model = build(position=position)
    rows = [torch.randint(1, 50, (1, length)) for length in LENGTHS]
    alone = torch.cat([model(row).logits for row in rows], 1)
    mask = torch.tensor([MASKS[case]], dtype=dtype)
    real = mask.bool()
    ids, positions = torch.ones_like(real, dtype=torch.int64), torch.ones_like(real, dtype=torch.int64)
    ids[real], positions[real] = torch.cat(rows, 1)[0], torch.cat([torch.arange(n) for n in LENGTHS])
    logits = model(ids, mask, position_ids=positions).logits
    torch.testing.assert_close(logits[real][None], alone, rtol=1e-9, atol=1e-10)
    # Padding of another row changes nothing.
    padded = torch.ones_like(mask)
    padded[:, -3:] = 0
    counted = torch.arange(ids.shape[1])[None]
    batch = model(torch.cat((ids, ids)), torch.cat((mask, padded)), position_ids=torch.cat((positions, counted))).logits
    torch.testing.assert_close(batch[:1], logits, rtol=1e-9, atol=1e-10)
    counted_logits = model(ids, padded, position_ids=counted).logits[:, :-3]
    torch.testing.assert_close(batch[1:, :-3], counted_logits, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(counted_logits, model(ids[:, :-3]).logits, rtol=1e-9, atol=1e-10)


def test_models_that_it_does_not_fit_say_so():
    with refused(r"^causal: expected True for a model that predicts the next token, got False$"):
        build(causal=False)
    with pytest.raises(ValueError, match=r"^classifier_pooling: expected 'mean' with causal=True, .* got 'cls'$"):
        build(EncoderForSequenceClassification)
    assert build(EncoderForSequenceClassification, classifier_pooling="mean")(torch.ones(1, 3, dtype=torch.long))
    # The head of a masked language model is the same.
    assert build().state_dict().keys() == build(EncoderForMaskedLM).state_dict().keys()


def test_what_trl_asks_of_a_model(tmp_path):
    """It gives the generation's configuration the tokenizer's tokens, and says that nothing is to be cached."""
    model = EncoderForCausalLM(small_config(causal=True)).eval()
    model.generation_config.pad_token_id = 3
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids, use_cache=False).logits, model(ids).logits)
    with pytest.raises(ValueError, match=r"^use_cache: expected False or None, .* got True"):
        model(ids, use_cache=True)
    model.save_pretrained(tmp_path)
    assert torch.equal(EncoderForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, model(ids).logits)


def test_the_trainer_smooths_the_labels_of_next_tokens(tmp_path):
    model, ids = build().eval(), torch.randint(3, 50, (4, 9))
    options = transformers.TrainingArguments(tmp_path, label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    loss = transformers.Trainer(model, options).compute_loss(model, {"input_ids": ids, "labels": ids})
    logits, following = model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(logits, following, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
