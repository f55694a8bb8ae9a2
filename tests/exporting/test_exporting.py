"""Exported programs compute what the model does, at batches and lengths that were not exported."""

import subprocess
import sys

import pytest
import torch

import whereformer
from tests.every import EVERY
from tests.exporting.models import LONGEST, exportable
from whereformer import (
    Encoder,
    EncoderForMaskedLM,
    EncoderForPreTraining,
    EncoderForQuestionAnswering,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
    Seq2SeqConfig,
    Seq2SeqForConditionalGeneration,
)
from whereformer.errors import InputError
from whereformer.exporting import to_onnx, to_torch
from whereformer.exporting.program import ExportableModel
from whereformer.models import pooling
from whereformer.models.presets import PRESETS

onnxruntime = pytest.importorskip("onnxruntime", reason="the export extra is not installed")

FIXED = {"learned", "synthesizer", "tupe", "floater", "rope2d"}
"""Methods with an end: a fixed number of positions or, for floater, a table in place of its solver."""

PLAIN = {"blocks": "2"}
FUNNEL = {"blocks": "1-1-1"}
WITH_DECODER = {"blocks": "1-1-1", "decoder_layers": "1"}


def inputs_of(model, batch, length, padded):
    ids = torch.randint(1, 50, (batch, length))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, (length + 1) // 2 :] = 0
    types = (torch.arange(length) > length // 2).long().expand(batch, -1)
    return {"input_ids": ids, "attention_mask": mask} | (
        {"token_type_ids": types} if getattr(model.config, "type_vocab_size", 0) else {}
    )


def runner(found):
    """The exported file as a function from inputs to a tuple of tensors."""
    if found.file.suffix == ".pt2":
        module = torch.export.load(found.file).module()
        return lambda inputs: module(**inputs)
    session = onnxruntime.InferenceSession(found.file, providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == list(found.inputs)
    assert all(each.shape == ["batch", "length"] for each in session.get_inputs())
    assert [each.name for each in session.get_outputs()] == list(found.outputs)
    return lambda inputs: [
        torch.from_numpy(array) for array in session.run(None, {name: each.numpy() for name, each in inputs.items()})
    ]


def largest_difference(model, found):
    """Between the file's outputs and the model's, whose own backend is not the exported one."""
    run, largest = runner(found), 0.0
    longest = LONGEST if found.max_length is None else found.max_length
    for batch, length in ((1, found.min_length), (2, found.min_length + 1), (3, 17), (1, 30), (4, longest)):
        for padded in (False, True):
            inputs = inputs_of(model, batch, length, padded)
            with torch.no_grad():
                wanted = model(**inputs)
                outputs = run(inputs)
            for name, output in zip(found.outputs, outputs, strict=True):
                assert output.shape == wanted[name].shape
                largest = max(largest, float((output - wanted[name]).abs().max()))
    return largest


def check(model, file):
    found = to_torch(model, file) if file.suffix == ".pt2" else to_onnx(model, file)
    assert found.error < 1e-5
    assert largest_difference(model, found) < 1e-5
    return found


@pytest.mark.parametrize("position", [pytest.param("learned+tisa", marks=pytest.mark.slow), "floater"])
def test_torch_quickly(position, tmp_path):
    found = check(exportable(EncoderForMaskedLM, position), tmp_path / "model.pt2")
    assert (found.outputs, found.min_length, found.max_length) == (("logits",), 1, LONGEST)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "options", "changes", "file"),
    [
        ("deberta", {"num_buckets": 8, "max_distance": 16}, PLAIN, "model.pt2"),
        ("inkling", {"extent": 6, "rank": 3, "log_scaling": 4}, {**PLAIN, "causal": True}, "model.onnx"),
        ("fox/deberta", {}, {**PLAIN, "windows": "3,0", "causal": True}, "model.pt2"),
    ],
)
def test_terms_that_meet_queries_and_keys(position, options, changes, file, tmp_path):
    check(exportable(EncoderForMaskedLM, position, **changes, position_options=options), tmp_path / file)


class Terms(torch.nn.Module):
    """Attention with the terms whose size is that of the call."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(2, 9, 8))
        self.narrow = torch.nn.Parameter(torch.randn(2, 9, 3))
        self.project = torch.nn.Linear(8, 3)

    def forward(self, query, key, value):
        terms = (
            whereformer.OffsetKeys(self.narrow, -4, query_factors=self.project(query)),
            whereformer.OffsetQueries(self.table, -4),
            whereformer.OffsetQueries(self.narrow, -4, key_factors=self.project(key)),
            whereformer.DistanceDecay(query.sum(-1).cumsum(-1), key.sum(-1).cumsum(-1)),
        )
        return whereformer.attention(query, key, value, terms, softcap=2.0)


def test_terms_of_the_call_in_a_program_of_any_length():
    module = Terms().eval()
    length = torch.export.Dim("length", min=2, max=64)
    inputs = torch.randn(3, 2, 2, 7, 8).unbind()
    run = torch.export.export(module, inputs, dynamic_shapes=[{2: length}] * 3).module()
    for n in (2, 23):
        inputs = torch.randn(3, 2, 2, n, 8).unbind()
        torch.testing.assert_close(run(*inputs), module(*inputs))


@pytest.mark.slow
def test_windows_in_torch(tmp_path):
    found = check(exportable(EncoderForMaskedLM, "tisa", windows="3,0"), tmp_path / "model.pt2")
    assert (found.min_length, found.max_length) == (1, None)


@pytest.mark.slow
def test_modern_layers_in_an_encoder(tmp_path):
    check(
        exportable(EncoderForMaskedLM, **{**PRESETS["neobert"], "qk_norm": True, "causal": True}),
        tmp_path / "model.pt2",
    )


@pytest.mark.slow
def test_modern_layers(tmp_path):
    changes = {**PRESETS["modernbert"], "windows": "0,3", "position_options": {"base": [300.0, 20.0]}}
    for file in ("model.pt2", "model.onnx"):
        check(exportable(EncoderForSequenceClassification, **changes, classifier_pooling="mean"), tmp_path / file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "file"),
    [
        (position, file)
        for position in ("transformer_xl", "rope", "shaw", "learned", "synthesizer")
        for file in ("model.pt2", "model.onnx")
        if EVERY or (position, file) in (("transformer_xl", "model.pt2"), ("rope", "model.onnx"))
    ],
)
def test_windows(position, file, tmp_path):
    check(exportable(EncoderForMaskedLM, position, windows="3,0"), tmp_path / file)
    check(exportable(EncoderForSequenceClassification, position, **FUNNEL, windows="4,5"), tmp_path / f"funnel-{file}")


def test_onnx_quickly(tmp_path):
    found = check(exportable(EncoderForSequenceClassification, "rope", windows="3,0"), tmp_path / "model.onnx")
    assert (found.inputs, found.max_length) == (("input_ids", "attention_mask"), None)


@pytest.mark.slow
def test_a_funnel_of_two_blocks(tmp_path):
    found = check(exportable(EncoderForMaskedLM, "t5", blocks="1-1", decoder_layers="1"), tmp_path / "model.pt2")
    assert found.min_length == 3


POSITIONS = [*whereformer.position_names(for_text=True), "learned+tisa", "tupe+t5"]
KINDS = {
    "masked LM ONNX": (EncoderForMaskedLM, PLAIN, "model.onnx"),
    "masked LM": (EncoderForMaskedLM, PLAIN, "model.pt2"),
    "classifier": (EncoderForSequenceClassification, PLAIN, "model.pt2"),
    "decoder": (EncoderForMaskedLM, WITH_DECODER, "model.pt2"),
    "decoder ONNX": (EncoderForMaskedLM, WITH_DECODER, "model.onnx"),
    "funnel": (EncoderForSequenceClassification, FUNNEL, "model.pt2"),
}
TO_ONNX = ("floater", "synthesizer", "tisa", "deberta", "fox", "inkling")
"""Methods that always go to ONNX too: each has operations that no other one has."""


def usual(turn, position, place):
    """Whether a method is exported as a kind even if not every combination is: all methods, and all kinds."""
    return place == (0 if position in TO_ONNX else 1) or turn == 3 * (place - 1) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "kind", "shape", "file"),
    [
        pytest.param(position, *case, id=f"{position}-{name}")
        for turn, position in enumerate(POSITIONS)
        for place, (name, case) in enumerate(KINDS.items())
        if EVERY or usual(turn, position, place)
    ],
)
def test_every_method_and_head(position, kind, shape, file, tmp_path):
    found = check(exportable(kind, position, **shape), tmp_path / file)
    assert (found.max_length is not None) == bool(FIXED & set(position.split("+")))
    assert found.min_length == (1 if shape is PLAIN else 5)


HEADS = [
    (Encoder, {}),
    (EncoderForMaskedLM, {"embedding_size": 8, "attention_backend": "blockwise"}),
    (Encoder, {**FUNNEL, "separate_cls": False}),
    (Encoder, {**WITH_DECODER, "pooling": "max", "truncate_seq": False, "norm": "pre", "pool_query_only": False}),
    (EncoderForQuestionAnswering, {**WITH_DECODER, "segments": "attention", "type_vocab_size": 2}),
    (EncoderForTokenClassification, {"type_vocab_size": 2, "blocks": "1x2"}),
    (EncoderForPreTraining, {**WITH_DECODER, "type_vocab_size": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes", "file"),
    [
        pytest.param(*head, file, id=f"{place}-{file}")
        for place, head in enumerate(HEADS)
        for file in ("model.pt2", "model.onnx")
        if EVERY or (place, file) in {(2, "model.pt2"), (5, "model.onnx")}
    ],
)
def test_every_head_and_shape(kind, changes, file, tmp_path):
    model = exportable(kind, "transformer_xl", **changes)
    found = check(model, tmp_path / file)
    assert ("token_type_ids" in found.inputs) == bool(model.config.type_vocab_size)


@pytest.mark.slow
def test_a_program_runs_where_only_torch_is_imported(tmp_path):
    model = exportable(EncoderForMaskedLM, "floater")
    file = to_torch(model, tmp_path / "model.pt2").file
    code = f"""
import sys, torch
ids = torch.ones(3, 7).long()
(logits,) = torch.export.load({str(file)!r}).module()(input_ids=ids, attention_mask=ids)
assert "whereformer" not in sys.modules
print(float(logits.abs().sum()))
"""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    with torch.no_grad():
        expected = float(model(torch.ones(3, 7).long()).logits.abs().sum())
    assert float(out) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_program_refuses_lengths_outside_its_range(tmp_path):
    run = torch.export.load(to_torch(exportable(Encoder, "floater"), tmp_path / "model.pt2").file).module()
    ids = torch.ones(1, LONGEST + 1, dtype=torch.long)
    with pytest.raises(AssertionError, match=f"<= {LONGEST}"):
        run(input_ids=ids, attention_mask=ids)


def test_a_model_of_few_positions():
    model = ExportableModel(exportable(EncoderForMaskedLM, "learned", max_position_embeddings=5))
    assert (model.outputs, model.max_length) == (("logits",), 5)


def test_a_funnel_that_reads_too_little_to_pool_is_refused(tmp_path):
    model = exportable(Encoder, "learned", max_position_embeddings=4, **FUNNEL)
    with pytest.raises(InputError, match=r"^model: expected a model that takes several lengths, got one of 4 "):
        to_torch(model, tmp_path / "model.pt2")


def test_the_model_itself_stays_as_it_is(tmp_path):
    model = exportable(Encoder, "floater", blocks="1", hidden_dropout_prob=0.5).train()
    to_torch(model, tmp_path / "model.pt2")
    assert model.training
    assert model.layers[0].attention.backend == "auto"
    assert model.position.table is None
    assert model(torch.ones(1, LONGEST + 9, dtype=torch.long)).last_hidden_state.shape[1] == LONGEST + 9


def test_floaters_table_is_its_trajectory_and_has_an_end():
    position = whereformer.build_position("floater", hidden_size=8, num_heads=2, substeps=1)
    wanted = position.trajectory(9)
    position.tabulate(9)
    torch.testing.assert_close(position.trajectory(7), wanted[:7], rtol=0, atol=0)
    assert "table" not in position.state_dict()
    with pytest.raises(whereformer.PositionRangeError, match="floater's table covers positions 0 to 8"):
        position.trajectory(10)


@pytest.mark.parametrize("times", [0, 1, 2, 3])
@pytest.mark.parametrize("separate", [True, False])
def test_the_least_length_can_be_pooled_and_one_less_cannot(times, separate):
    from whereformer.exporting.program import least_length

    way = pooling.Pooling("mean", separate, True, "any")

    def pooled(length):
        lengths = [length]
        for _ in range(times):
            if not way.applies_to(lengths[-1]):
                return None
            lengths.append(way.length(lengths[-1]))
        return lengths

    least = least_length(way, times)
    assert pooled(least) is not None
    assert least == 1 or pooled(least - 1) is None


def rounded_to_int8(model):
    """The same model with weights and products' inputs rounded to 8 bits in plain PyTorch."""

    def round_to(tensor, low, high, scale, zero=0):
        return ((tensor / scale).round().add(zero).clamp(low, high) - zero) * scale

    def activations(module, arguments):
        (hidden,) = arguments
        low, high = hidden.min().clamp(max=0), hidden.max().clamp(min=0)
        scale = (high - low) / 255
        return (round_to(hidden, 0, 255, scale, (-low / scale).round()),)

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                largest = module.weight.abs()
                # The rows of a table of embeddings share their scale, those of a product have their own.
                largest = largest.max() if isinstance(module, torch.nn.Embedding) else largest.amax(1, keepdim=True)
                module.weight.copy_(round_to(module.weight, -127, 127, largest / 127))
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(activations)
    return model


@pytest.mark.slow
def test_int8_is_as_exact_as_rounding_to_8_bits_is(tmp_path):
    """At most twice the error that the same rounding makes in plain PyTorch."""
    make = {"hidden_size": 64, "vocab_size": 500, "position": "tisa"}
    torch.manual_seed(1)
    model = exportable(EncoderForMaskedLM, **make)
    torch.manual_seed(1)
    rounded = rounded_to_int8(exportable(EncoderForMaskedLM, **make))
    found = to_onnx(model, tmp_path / "model.onnx", int8=True)
    run, errors = runner(found), torch.zeros(2)
    sizes = torch.zeros(1)
    for batch, length in ((4, 30), (2, 17), (8, 9)):
        inputs = inputs_of(model, batch, length, padded=True)
        with torch.no_grad():
            wanted = model(**inputs).logits
            errors += torch.stack(
                [(each - wanted).square().sum() for each in (run(inputs)[0], rounded(**inputs).logits)]
            )
            sizes += wanted.square().sum()
    ours, plain = (errors / sizes).sqrt().tolist()
    assert 0 < ours < 2 * plain
    assert ours < 0.1
    assert found.quantized_error == pytest.approx(ours, rel=0.5)
    whole = to_onnx(model, tmp_path / "float.onnx")
    assert found.file.stat().st_size < 0.6 * whole.file.stat().st_size


def test_other_models_are_refused(tmp_path):
    translator = Seq2SeqForConditionalGeneration(Seq2SeqConfig.preset("small", vocab_size=20, hidden_size=8))
    with pytest.raises(ValueError, match=r"model: expected an Encoder, .* got Seq2SeqForConditionalGeneration"):
        to_torch(translator, tmp_path / "model.pt2")
    with pytest.raises(ValueError, match=r"model: expected a model in float32, got torch.float64"):
        to_torch(exportable(Encoder, "none").double(), tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())
