"""torch.export and torch.onnx.export take our models and attached ones as they are, for any batch and length."""

import io

import pytest
import torch
from torch.export import Dim
from transformers import BertConfig, BertForSequenceClassification

from whereformer import Encoder, EncoderConfig, EncoderForMaskedLM, attach

from . import originals
from .peers import enlarge

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


def encoder(position, blocks="1", kind=Encoder, **options):
    return kind(EncoderConfig(**SIZES, blocks=blocks, position=position, max_position_embeddings=40, **options))


def bert():
    config = BertConfig(**SIZES, num_hidden_layers=1, max_position_embeddings=40, num_labels=3)
    return attach(BertForSequenceClassification(config), "tisa")


MODELS = {
    "rope": (lambda: encoder("rope"), 1),
    "t5": (lambda: encoder("t5", windows="4"), 1),
    "shaw": (lambda: encoder("shaw", kind=EncoderForMaskedLM), 1),
    "tisa": (lambda: encoder("tisa", "1x2"), 1),
    "funnel": (lambda: encoder("transformer_xl", "1-1", decoder_layers="1", segments="attention"), 8),
    "attached": (bert, 1),
}
"""Each model, and a number of which lengths are multiples in a .pt2 file."""


def cases(*quick):
    """Each model; those that are not quick are slow."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in MODELS]
    )


def strong(name):
    """A model with parameters so large that each one matters."""
    torch.manual_seed(0)
    make, of = MODELS[name]
    model = enlarge(make(), 0.1)
    model.config.return_dict = False
    return model, of


def inputs_of(batch, length):
    ids = torch.randint(3, 50, (batch, length))
    mask = torch.ones_like(ids)
    mask[-1, (length + 1) // 2 :] = 0
    types = (torch.arange(length) > length // 2).long().expand(batch, -1)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def check(model, run, lengths):
    """Compare a program with the model, at other batches and lengths than it was traced with."""
    for batch, length in zip((1, 3, 1, 4), lengths, strict=True):
        inputs = inputs_of(batch, length)
        torch.testing.assert_close(torch.as_tensor(run(inputs)), model(**inputs)[0], rtol=0, atol=3e-5)


@torch.no_grad()
@cases("shaw")
def test_torch_export(name):
    model, of = strong(name)
    longest = None if of > 1 or name == "rope" else 40 // of
    axes = {0: Dim.DYNAMIC, 1: of * Dim("n", min=2 if of > 1 else 1, max=longest)}
    inputs = inputs_of(2, 24)
    program = torch.export.export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, axes), strict=False)
    # It needs no kernel of this library.
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    assert "whereformer" not in {str(node.target).partition(".")[0] for graph in graphs for node in graph.nodes}
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    module = torch.export.load(file).module()
    check(model, lambda inputs: module(**inputs)[0], (16, 24, 32, 40) if of > 1 else (2, 17, 30, 40))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@cases("attached")
def test_onnx_runtime_gives_the_same_numbers(name):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model, _ = strong(name)
    inputs = inputs_of(2, 24)
    axes = {name: {0: "batch", 1: "length"} for name in inputs}
    program = torch.onnx.export(model, (), kwargs=inputs, dynamo=True, dynamic_shapes=axes, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())

    def run(inputs):
        return session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]

    check(model, run, (5, 17, 30, 40))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize(("family", "position"), [("modernbert", "tisa"), ("deberta", "none"), ("modernbert", "shaw")])
def test_onnx_files_of_attached_models_fit_any_length(family, position):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = attach(originals.theirs(family, max_position_embeddings=170).float(), position)
    enlarge(model, 0.1).config.return_dict = False
    inputs = {name: tensor for name, tensor in inputs_of(2, 24).items() if name != "token_type_ids"}
    axes = {name: {0: "batch", 1: "length"} for name in inputs}
    program = torch.onnx.export(model, (), kwargs=inputs, dynamo=True, dynamic_shapes=axes, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    for batch, length in ((3, 7), (1, 33), (2, 130)):
        inputs = {name: tensor for name, tensor in inputs_of(batch, length).items() if name != "token_type_ids"}
        (states, *_) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(torch.as_tensor(states)[real], model(**inputs)[0][real], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_jit_tracing_says_what_to_do_instead():
    ids = torch.randint(3, 50, (2, 7))
    with pytest.raises(TypeError, match=r"^Positions.length: expected an int, got tensor"):
        torch.jit.trace(bert(), (ids, torch.ones_like(ids)), strict=False)
