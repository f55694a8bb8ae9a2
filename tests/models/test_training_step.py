"""A training step with checkpointing, and compiled: the gradients of plain eager mode, for every method."""

import pytest
import torch

from whereformer import (
    Electra,
    ElectraPretrainingConfig,
    EncoderConfig,
    EncoderForMaskedLM,
    Seq2SeqConfig,
    Seq2SeqForConditionalGeneration,
)
from whereformer.positions import position_names

from .checkpointing import checkpoint_activations
from .peers import close_steps
from .test_encoder import SMALL

SIZES = {**SMALL, "intermediate_size": 32, "max_position_embeddings": 16, "type_vocab_size": 0}


def encoder(position="tisa", **options):
    return EncoderForMaskedLM(EncoderConfig(position=position, **{**SIZES, "blocks": "1x2", **options})).train()


def translator(position):
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "hidden_dropout_prob": 0.0, "decoder_start_token_id": 1}
    return Seq2SeqForConditionalGeneration(Seq2SeqConfig(position=position, **sizes, **layers)).train()


def batch(**extra):
    ids = torch.randint(3, 50, (3, 12))
    labels = torch.where(torch.rand(3, 12) < 0.4, ids, -100)
    labels[:, 1] = ids[:, 1]
    return {"input_ids": ids, "labels": labels, **extra}


def step(model, inputs, run=None):
    """The loss and the gradients of a step, by name; what is dropped is always the same."""
    model.zero_grad()
    torch.manual_seed(3)
    loss = (model if run is None else run)(**inputs).loss
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.detach(), {name: gradient.clone() for name, gradient in gradients.items()}


QUICK = ("floater", "shaw", "rope", "transformer_xl", "deberta", "fox", "synthesizer", "tupe+t5")
"""One of each kind of terms, and what layers share."""


@pytest.mark.parametrize(
    "position",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in [*position_names(), "tupe+t5"]],
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(position, reentrant):
    # Layers that run again alone do not share what the method drops.
    drops = position == "transformer_xl" and not reentrant
    options = {"hidden_dropout_prob": 0.1, "position_options": {"dropout": 0.3} if drops else {}}
    funnel = {"blocks": "1x2-2", "decoder_layers": "1x2", "windows": "8,0"}
    for model in (encoder(position, **options), encoder(position, **options, **funnel)):
        inputs = batch()
        expected = step(model, inputs)
        checkpoint_activations(model, use_reentrant=reentrant)
        close_steps(step(model, inputs), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("position", ["floater", "shaw", "tupe", "rope"])
def test_checkpointing_a_translator_gives_the_same_gradients(position, reentrant):
    model, inputs = translator(position), batch()
    expected = step(model, inputs)
    checkpoint_activations(model, use_reentrant=reentrant)
    close_steps(step(model, inputs), expected)


def electra(position="tisa"):
    return Electra(ElectraPretrainingConfig(position=position, generator_size=0.5, **SIZES, blocks="1x2")).train()


COMPILED = {
    "encoder": lambda: (encoder(), batch()),
    "funnel": lambda: (encoder("transformer_xl", blocks="1-1", decoder_layers="1"), batch()),
    "electra": lambda: (electra(), batch(uniforms=torch.rand(3, 12))),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", ["encoder", "funnel", pytest.param("electra", marks=pytest.mark.every)])
def test_a_compiled_step_is_the_eager_one(name):
    torch.compiler.reset()
    model, inputs = COMPILED[name]()
    expected = step(model, inputs)
    close_steps(step(model, inputs, torch.compile(model, backend="aot_eager")), expected)
