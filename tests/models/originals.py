"""Models of transformers that ours are compared with, what both compute, and changes of their checkpoints."""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file

from whereformer import (
    Encoder,
    EncoderForMaskedLM,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
    load_pretrained,
)

HEADS = {
    "Model": Encoder,
    "ForMaskedLM": EncoderForMaskedLM,
    "ForSequenceClassification": EncoderForSequenceClassification,
    "ForTokenClassification": EncoderForTokenClassification,
}


def make_original(name, options, head="Model"):
    """A model of transformers in float64, with parameters so large that each one matters."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**options)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def run(model, inputs):
    """All hidden states and what the head says, at real tokens."""
    out = model(**inputs, output_hidden_states=True)
    real = inputs["attention_mask"].bool()
    tensors = [*out.hidden_states]
    for name in ("last_hidden_state", "logits", "prediction_logits"):
        tensors += [out[name]] if name in out else []
    return [tensor[real] if tensor.shape[:2] == real.shape else tensor for tensor in tensors]


def close(actual, expected, rtol=1e-9, atol=1e-10):
    """Compare what two models computed, the number of tensors too."""
    for number, golden in zip(actual, expected, strict=True):
        torch.testing.assert_close(number, golden, rtol=rtol, atol=atol)


def weighted(outputs):
    generator = torch.Generator().manual_seed(2)
    return sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outputs)


def compare_gradients(ours, original, folder, *, tolerance=1e-9, zero=lambda name: False):
    """Compare gradients of all parameters, of which only those that ``zero`` names may be zero there.

    A checkpoint that holds the original's gradients in place of its weights is read with the same names.
    """
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    original.save_pretrained(folder)
    gradients = load_pretrained(folder, dtype=torch.float64)
    for (name, parameter), golden in zip(ours.named_parameters(), gradients.parameters(), strict=True):
        if not golden.any() and zero(name):
            continue
        assert golden.any(), name
        torch.testing.assert_close(
            parameter.grad, golden, rtol=1e-8, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def rewrite(folder, change=None, **config):
    """Change the tensors of a checkpoint, and fields of its configuration; None for one that is not there."""
    if change is not None:
        file = folder / "model.safetensors"
        state = load_file(file)
        change(state)
        save_file(state, file, {"format": "pt"})
    file = folder / "config.json"
    fields = {**json.loads(file.read_text()), **config}
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
