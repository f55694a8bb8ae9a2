"""``detach``, and models and methods that ``attach`` refuses: the model is as before."""

import pytest
import torch
import transformers
from torch import nn

from whereformer import Encoder, EncoderConfig, attach, detach
from whereformer.errors import InputError
from whereformer.models.attachment.attach import AttachSettings
from whereformer.positions.tisa import Tisa

from .patched import INKLING
from .peers import SWITCHABLE, attach_unverified, close, everything, make, refused, states, switch


@pytest.mark.parametrize("implementation", ["eager", pytest.param("sdpa", marks=pytest.mark.slow)])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", SWITCHABLE)
def test_detaching_restores_the_model(name, keep, implementation):
    model = make(name)
    switch(model, implementation)
    before, expected, parameters = everything(model), states(model), list(model.parameters())
    attach_unverified(model, "tisa", keep_absolute=keep)
    assert everything(model) != before
    assert detach(model) is model
    assert everything(model) == before
    assert all(mine is their for mine, their in zip(model.parameters(), parameters, strict=True))
    assert {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")} == {implementation}
    torch.testing.assert_close(states(model), expected, rtol=0, atol=0)
    attach_unverified(model, "shaw")


def test_detached_parts_follow_where_the_model_went():
    for name in ("bert", "modernbert", "t5"):
        model = attach(make(name), "tisa", keep_absolute=False).double()
        detach(model)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
        close(states(model), states(make(name).double()))


@pytest.mark.parametrize(("kind", "method"), [(Tisa, "train"), (AttachSettings, "_asdict")])
def test_a_failed_attach_leaves_the_model_alone(kind, method, monkeypatch):
    """In the middle, and in the last step, after the implementation was switched."""
    model = make("bert")
    before, expected = everything(model), states(model)

    def fail(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(kind, method, fail)
    with pytest.raises(RuntimeError, match="no"):
        attach(model, "tisa", keep_absolute=False)
    assert everything(model) == before
    torch.testing.assert_close(states(model), expected, rtol=0, atol=0)


# Errors

FUNNEL = {"vocab_size": 50, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32}


def test_models_that_do_not_dispatch(caplog):
    instead = "whereformer.load_pretrained converts it to an encoder that accepts any method"
    with refused(rf"^model: \w+ does not dispatch attention through AttentionInterface; {instead}$"):
        attach(transformers.FunnelModel(transformers.FunnelConfig(**FUNNEL)), "tisa")
    assert not caplog.text


@pytest.mark.parametrize(
    ("error", "message", "position", "options"),
    [
        (ValueError, "position: unknown position method 'tsia'; did you mean 'tisa'", "tsia", {}),
        (TypeError, "position: expected the name of a method, got None", None, {}),
        (TypeError, "position 'tisa' has no option 'kernels'", "tisa", {"kernels": 3}),
        (ValueError, "position: Learned acts on the embeddings", "learned", {}),
        (ValueError, "position: Sinusoidal acts on the embeddings", "tisa+sinusoidal", {}),
        (ValueError, r"position: it replaces query \. key", "synthesizer", {}),
        (ValueError, "num_heads: the model fixes this at 2; leave", "tisa", {"num_heads": 4}),
        (ValueError, "causal: the model fixes this at False", "tisa", {"causal": True}),
    ],
)
def test_bad_methods(error, message, position, options):
    model = make("bert")
    before = everything(model)
    with pytest.raises(error, match=rf"^{message}"):
        attach(model, position, **options)
    assert everything(model) == before


def test_models_of_text_and_images_get_a_method_for_their_text():
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": 50, "eos_token_id": 49},
        vision_config={**tower, "image_size": 32},
        projection_dim=8,
    )
    model = make(transformers.CLIPModel(config))
    inputs = {"input_ids": torch.randint(3, 49, (2, 7)), "pixel_values": torch.randn(2, 3, 32, 32)}
    inputs["input_ids"][:, -1] = 49
    expected = model(**inputs).logits_per_image
    with pytest.raises(InputError, match=r"^model: CLIPModel did not .* to a part of it: text_model$"):
        attach(model, "tisa")
    with pytest.raises(InputError, match=r"^model: expected a text model, or an audio model .* reads 'pixel_values'$"):
        attach(model.vision_model, "tisa")
    attach(model.text_model, "tisa")
    assert (model(**inputs).logits_per_image - expected).abs().max() > 1e-3
    nn.init.zeros_(model.text_model.whereformer.amplitude)
    close(model(**inputs).logits_per_image, expected)


def test_bad_models():
    with pytest.raises(TypeError, match=r"^model: expected a PreTrainedModel of transformers, got Linear$"):
        attach(nn.Linear(2, 2), "tisa")
    with pytest.raises(TypeError, match=r"got a name; AutoModel.from_pretrained\('bert'\) of transformers loads"):
        attach("bert", "tisa")
    with pytest.raises(ValueError, match=r"^model: Encoder is built with its method: set position='tisa' in its"):
        attach(Encoder(EncoderConfig(vocab_size=50, hidden_size=16, num_attention_heads=2, blocks="1")), "tisa")
    model = make("bert")
    with pytest.raises(ValueError, match=r"^model: no position method is attached to this BertModel$"):
        detach(model)
    attach(model, "tisa")
    with pytest.raises(ValueError, match=r"^model: a position method is attached already; call whereformer.detach"):
        attach(model, "none")
    detach(model)
    with pytest.raises(ValueError, match=r"^model: no position method"):
        detach(model)
    with pytest.raises(ValueError, match=r"^keep_absolute: BartModel has no positions that attach can"):
        attach(make("bart"), "tisa", keep_absolute=False)
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4}
    with pytest.raises(InputError, match=r"^keep_absolute: GPTJModel does not run without its positions; keep_abs"):
        attach(transformers.GPTJModel(transformers.GPTJConfig(**sizes)), "tisa", keep_absolute=False)
    with refused(r"^position: the layers of \w+ differ in the number or width of heads; expected 'none', got"):
        attach(INKLING.make(swa_num_attention_heads=2), "tisa")
