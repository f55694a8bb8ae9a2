"""Several texts in one row without padding, as transformers' collators give them: each is as if it were alone."""

import re

import pytest
import torch
import transformers
from transformers import DataCollatorWithFlattening

from whereformer import (
    Electra,
    ElectraPretrainingConfig,
    Encoder,
    EncoderConfig,
    EncoderForMaskedLM,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
    attach,
    position_names,
)
from whereformer.kernels import varlen
from whereformer.positions import visible_keys

LENGTHS = 11, 3, 7, 1, 2, 9
SIZES = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
FUNNEL = {"blocks": "1-1-1", "decoder_layers": "1"}
ENDS = torch.tensor((0, *LENGTHS), dtype=torch.int32).cumsum(0, dtype=torch.int32)
SEQ = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
METHODS = position_names()


def randomized(kind, config_class=EncoderConfig, **options):
    """A model in double precision without dropout, whose parameters are all random."""
    options = {"blocks": "2", "max_position_embeddings": 12, **options}
    config = config_class(**SIZES, **options, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = kind(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def texts_and_row(**options):
    """Texts, and what a collator makes of them."""
    texts = [torch.randint(1, 50, (1, n)) for n in LENGTHS]
    row = DataCollatorWithFlattening(**{"return_flash_attn_kwargs": True, **options})(
        [{"input_ids": t[0]} for t in texts]
    )
    del row["labels"]
    return texts, row


def equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def compare(model, texts, row, types=None):
    """The states of all tokens and the gradients of all parameters."""
    kinds = [None] * len(texts) if types is None else types
    alone = [model(text, token_type_ids=kind).last_hidden_state for text, kind in zip(texts, kinds, strict=True)]
    packed = model(**row, token_type_ids=None if types is None else torch.cat(types, 1)).last_hidden_state
    alone = torch.cat(alone, 1)
    equal(packed, alone)
    weight = torch.randn_like(alone)
    gradients = [
        torch.autograd.grad((states * weight).sum(), [*model.parameters()], allow_unused=True, materialize_grads=True)
        for states in (packed, alone)
    ]
    for (name, _), ours, theirs in zip(model.named_parameters(), *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "position",
    [
        *METHODS,
        "learned+tisa",
        "tupe+t5",
        "fire+kerple",
        "rope+logn",
        "rope+shaw",
        "deberta+rope",
        "rope+transformer_xl",
    ],
)
def test_every_method_keeps_texts_apart(position):
    compare(randomized(Encoder, position=position), *texts_and_row())


WAYS = {
    "cu_seq_lens_q": {},
    "no positions": {"return_position_ids": False},
    "both": {"return_seq_idx": True},
    "seq_idx": {"return_seq_idx": True, "return_flash_attn_kwargs": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("blocks", [{"blocks": "1x2"}, FUNNEL])
def test_every_way_to_tell_texts(way, blocks):
    texts, row = texts_and_row(**WAYS[way])
    model = randomized(Encoder, position="learned+fire", **blocks)
    compare(model, texts, row)
    ours = model(row["input_ids"], document_ids=SEQ + 3).last_hidden_state
    equal(ours, model(**row).last_hidden_state)


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("position", ["floater", "fire+tisa"])
def test_where_looking_would_stall_the_device(position, looks, monkeypatch):
    for module in (varlen, visible_keys):
        monkeypatch.setattr(module, "can_read", lambda _: looks)
    compare(randomized(Encoder, position=position), *texts_and_row())


def test_padding_is_not_counted_in_a_document():
    model = randomized(Encoder, position="learned+rope", count_padding=False)
    ids = torch.randint(1, 50, (1, 8))
    padded, real = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1), torch.arange(11)[None] >= 3
    states = model(padded, real, document_ids=torch.zeros_like(padded)).last_hidden_state[:, 3:]
    equal(states, model(ids).last_hidden_state)


@pytest.mark.parametrize("blocks", [{"blocks": "1"}, FUNNEL])
def test_an_encoder_says_which_documents_its_states_are_of(blocks):
    model = randomized(Encoder, position="tisa", **blocks)
    ids, documents = torch.randint(1, 50, (1, 9)), torch.tensor([[7] * 5 + [3] * 4])
    output = model(ids, document_ids=documents)
    assert model(ids).documents is None
    assert output.documents.shape == output.last_hidden_state.shape[:2]
    assert len(output.documents.unique_consecutive()) == 2
    # Besides [CLS], five tokens leave two, and four leave one.
    short = randomized(Encoder, position="tisa", blocks="1-1")(ids, document_ids=documents)
    assert short.documents.tolist() == [[0, 0, 0, 1, 1]]


@pytest.mark.parametrize("blocks", [{"blocks": "1"}, FUNNEL])
def test_rows_without_texts(blocks):
    model = randomized(Encoder, position="learned+tisa", **blocks)
    ids = torch.zeros(1, 0, dtype=torch.long)
    assert model(ids, cu_seq_lens_q=torch.tensor([0])).last_hidden_state.shape == (1, 0, 16)


def test_an_attached_mpnet_finds_the_texts_of_a_row():
    sizes = {**SIZES, "vocab_size": 51, "num_hidden_layers": 2, "max_position_embeddings": 40}
    model = transformers.MPNetForMaskedLM(transformers.MPNetConfig(**sizes)).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    attach(model, "fire+tisa")
    texts, row = texts_and_row()
    row["input_ids"], row["position_ids"] = row["input_ids"] + 1, row["position_ids"] + 2  # 1 is padding
    equal(model(**row).logits, torch.cat([model(text + 1).logits for text in texts], 1))


def test_one_text():
    model = randomized(Encoder, position="tisa", **FUNNEL)
    ids = torch.randint(1, 50, (1, 9))
    for ends in ((0, 9), (0, 0, 9, 9)):  # and texts without a token
        boundaries = torch.tensor(ends)
        equal(model(ids, cu_seq_lens_q=boundaries).last_hidden_state, model(ids).last_hidden_state)


@pytest.mark.parametrize("position", [*METHODS, "tupe+t5"])
def test_funnels_pool_each_text(position):
    types = [torch.cat([torch.full((1, 1), 2), torch.randint(0, 2, (1, n - 1))], 1) for n in LENGTHS]
    options = {"segments": "attention", "type_vocab_size": 3} if position != "synthesizer" else {}
    compare(randomized(Encoder, position=position, **FUNNEL, **options), *texts_and_row(), types if options else None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_hole_in_a_text_begins_no_other(dtype):
    model = randomized(Encoder, segments="attention", type_vocab_size=3)
    ids, types = torch.randint(1, 50, (1, 8)), torch.tensor([[2, 0, 0, 1, 1, 0, 1, 1]])
    kwargs = {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]]), "token_type_ids": types}
    alone = model(ids, **kwargs).last_hidden_state
    packed = model(ids, **kwargs, seq_idx=torch.zeros(1, 8, dtype=dtype)).last_hidden_state
    equal(packed[:, kwargs["attention_mask"][0] == 1], alone[:, kwargs["attention_mask"][0] == 1])


@pytest.mark.parametrize(
    "options",
    [
        {"truncate_seq": False},
        {"separate_cls": False},
        {"pool_query_only": False, "pooling": "max"},
        {"separate_cls": False, "truncate_seq": False, "pooling": "min", "blocks": "1-1"},
        {"norm": "pre", "windows": "4"},
    ],
)
def test_every_pooling(options):
    compare(randomized(Encoder, position="tisa", **{**FUNNEL, **options}), *texts_and_row())


def test_given_positions_are_pooled():
    model = randomized(Encoder, position="fire", **FUNNEL)
    texts, _ = texts_and_row()
    position_ids = [torch.randint(0, 100, (1, n)).sort().values for n in LENGTHS]
    alone = [model(text, position_ids=ids).last_hidden_state for text, ids in zip(texts, position_ids, strict=True)]
    packed = model(torch.cat(texts, 1), position_ids=torch.cat(position_ids, 1), document_ids=SEQ)
    equal(packed.last_hidden_state, torch.cat(alone, 1))


@pytest.mark.parametrize("blocks", [{}, FUNNEL])
def test_heads_of_tokens(blocks):
    texts, row = texts_and_row()
    labels = [torch.where(text % 2 == 0, text % 5, -100) for text in texts]
    labels[0][0, 1] = 3
    for kind in (EncoderForMaskedLM, EncoderForTokenClassification):
        model = randomized(kind, position="tisa", num_labels=5, **blocks)
        packed = model(**row, labels=torch.cat(labels, 1))
        alone = [model(text).logits for text in texts]
        equal(packed.logits, torch.cat(alone, 1))
        known = torch.cat(labels, 1).flatten()
        equal(packed.loss.double(), torch.nn.functional.cross_entropy(torch.cat(alone, 1)[0].float(), known).double())


@pytest.mark.parametrize("blocks", [{}, FUNNEL, {"classifier_pooling": "mean"}])
def test_every_text_has_a_class(blocks):
    texts, row = texts_and_row()
    model = randomized(EncoderForSequenceClassification, position="tisa", num_labels=3, **blocks)
    labels = torch.randint(0, 3, (len(texts),))
    packed = model(**row, labels=labels)
    alone = torch.cat([model(text).logits for text in texts])
    equal(packed.logits, alone)
    torch.testing.assert_close(packed.loss, torch.nn.functional.cross_entropy(alone.float(), labels))


def test_electra():
    texts, row = texts_and_row()
    model = randomized(Electra, ElectraPretrainingConfig, position="transformer_xl", lm_head="bert", **FUNNEL)
    labels = [torch.where(torch.arange(n) % 2 == 0, 7, -100)[None] for n in LENGTHS]
    sampled = [(text + 1) % 50 for text in texts]
    packed = model(**row, labels=torch.cat(labels, 1), sampled_ids=torch.cat(sampled, 1))
    parts = zip(texts, labels, sampled, strict=True)
    alone = [model(text, labels=known, sampled_ids=ids) for text, known, ids in parts]
    equal(packed.generator_logits, torch.cat([output.generator_logits for output in alone]))
    equal(packed.discriminator_logits, torch.cat([output.discriminator_logits for output in alone], 1))
    shares = torch.tensor(LENGTHS) / sum(LENGTHS)
    losses = torch.stack([output.discriminator_loss for output in alone])
    torch.testing.assert_close(packed.discriminator_loss, (losses * shares).sum().float())


IDS = torch.ones_like(SEQ)


def test_a_mask_of_ones_is_no_padding():
    model = randomized(Encoder, position="tisa", **FUNNEL)
    states = [model(IDS, seq_idx=SEQ, **options).last_hidden_state for options in ({"attention_mask": IDS}, {})]
    assert torch.equal(*states)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cu_seq_lens_q": ENDS[:-1]}, "cu_seq_lens_q: expected non-decreasing integers from 0 to 33 (the rows of"),
        ({"cu_seq_lens_q": ENDS[1:]}, "cu_seq_lens_q: expected non-decreasing integers from 0 to 33"),
        ({"cu_seq_lens_q": ENDS.float()}, "cu_seq_lens_q: expected an integer tensor"),
        ({"cu_seq_lens_q": ENDS, "input_ids": IDS.repeat(2, 1)}, "cu_seq_lens_q: it needs one row and no cache, got 2"),
        ({"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS[1:]}, "cu_seq_lens_k: expected the numbers of cu_seq_lens_q"),
        ({"cu_seq_lens_k": ENDS}, "cu_seq_lens_k: expected cu_seq_lens_q too, got None"),
        ({"cu_seq_lens_q": ENDS, "seq_idx": SEQ // 2}, "seq_idx: expected the documents of cu_seq_lens_q, got others"),
        ({"seq_idx": SEQ > 0}, "seq_idx: expected an integer tensor, got torch.bool"),
        ({"cu_seq_lens_q": ENDS > 0}, "cu_seq_lens_q: expected an integer tensor, got torch.bool"),
        ({"seq_idx": SEQ[:, 1:]}, "seq_idx: it needs (batch, n) and no cache, got 1 rows"),
        ({"seq_idx": SEQ, "document_ids": SEQ}, "document_ids: expected None with cu_seq_lens_q"),
        ({"seq_idx": SEQ, "position_ids": SEQ}, "position_ids: expected 0, 1, ... in each text, got others"),
        ({"seq_idx": SEQ, "attention_mask": SEQ}, "attention_mask: a model that pools accepts packed texts only"),
        (
            {"seq_idx": SEQ.repeat(2, 1), "input_ids": IDS.repeat(2, 1)},
            "document_ids: a model that pools accepts packed",
        ),
    ],
)
def test_what_does_not_fit_is_refused(kwargs, message):
    model = randomized(Encoder, position="tisa", **FUNNEL)
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        model(**{"input_ids": IDS, **kwargs})
