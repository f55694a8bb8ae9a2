"""Models with positions of their own, and models of sound: ``attach`` keeps what they compute, without matrices."""

import copy
import pickle

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from whereformer import attach, detach, load_attached
from whereformer.errors import InputError

from .checkpointing import checkpoint_activations
from .served import KINDS, SERVED


def run(model, inputs):
    """The hidden states of real tokens, and the gradients of every parameter."""
    model.zero_grad()
    hidden = model(**inputs).last_hidden_state
    if (mask := inputs.get("attention_mask")) is not None:
        if mask.shape[1] != hidden.shape[1]:
            mask = model._get_feature_vector_attention_mask(hidden.shape[1], mask)
        hidden = hidden[mask.bool()]
    (hidden * torch.arange(hidden.numel()).double().cos().view_as(hidden)).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


class Largest(TorchDispatchMode):
    """Records the largest number of entries that an operation returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                self.entries = max(self.entries, tensor.numel())
        return out


@pytest.mark.parametrize("length", [1, 2, 13])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_it_computes_the_same_and_every_gradient(name, padded, length):
    kind = KINDS[name]
    if not kind.masked and (padded or length != 13):
        pytest.skip("its inputs have one size")
    if length < (4 if kind.name == "SEW" else 3 if padded else 1):
        pytest.skip("too short for it")
    model = kind.make()
    inputs = kind.inputs(model, length, padded=padded)
    expected, gradients = run(model, inputs)
    attach(model, "none")
    found, others = run(model, inputs)
    assert_same([found], [expected])
    assert others.keys() == gradients.keys()
    scale = max(gradient.abs().max() for gradient in gradients.values())
    assert_same([others[key] / scale for key in gradients], [gradients[key] / scale for key in gradients])
    assert_same([run(detach(model), inputs)[0]], [expected])


@pytest.mark.parametrize("name", SERVED)
def test_no_tensor_has_a_number_for_every_pair(name):
    """Twice as many tokens have at most twice as many numbers, forward and backward; in Swin four times as many."""
    kind = SERVED[name]
    most = []
    for factor in (1, 2):
        sizes = {}
        if kind.reads == "images":
            windowed = "Swin" in kind.name
            sizes = {"window_size": 8 * factor, "depths": [1], "num_heads": [2]} if windowed else {}
            sizes["image_size"] = 2 * 16 if windowed else (64, 64 * factor)
        model = kind.make(**sizes)
        inputs = kind.inputs(model, 96 * factor, padded=kind.masked)
        attach(model, "none")
        with Largest() as largest:
            run(model, inputs)
        most.append(largest.entries)
    tokens = 4 if "Swin" in kind.name else 2
    assert most[1] <= 1.1 * tokens * most[0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_layers_can_run_again_for_their_gradients(name, reentrant):
    kind = SERVED[name]
    model = attach(kind.make(), "none")
    if reentrant and "Swin" in kind.name:
        pytest.skip("transformers cannot checkpoint it so")
    inputs = kind.inputs(model, 13, padded=kind.masked)
    expected = run(model, inputs)
    checkpoint_activations(model, use_reentrant=reentrant)
    model.train()
    found = run(model, inputs)
    model.eval()
    if not any(isinstance(module, torch.nn.BatchNorm1d) for module in model.modules()):
        assert_same([found[0], *found[1].values()], [expected[0], *(expected[1][key] for key in found[1])])


@pytest.mark.parametrize("name", SERVED)
def test_a_method_is_added_to_the_models_own_positions(name):
    kind = SERVED[name]
    model = kind.make()
    inputs = kind.inputs(model, 13, padded=kind.masked)
    expected = run(model, inputs)[0]
    if "Swin" in kind.name:
        with pytest.raises(
            InputError, match=r"^position: the layers of \w+ differ in their heads; expected 'none', got"
        ):
            attach(model, "tisa")
        return
    attach(model, "tisa")
    method = next(part.whereformer for part in model.modules() if hasattr(part, "whereformer"))
    with torch.no_grad():
        method.amplitude.add_(1.0)
    found, gradients = run(model, inputs)
    assert (found - expected).abs().max() > 1e-3
    (gradient,) = (each for key, each in gradients.items() if key.endswith("whereformer.amplitude"))
    assert (gradient.flatten(1).abs().amax(1) > 0).all()
    with torch.no_grad():
        method.amplitude.zero_()
    assert_same([run(model, inputs)[0]], [expected])


@pytest.mark.parametrize("name", SERVED)
def test_it_saves_and_loads(name, tmp_path):
    kind = SERVED[name]
    model = attach(kind.make(), "none" if "Swin" in kind.name else "tisa")
    inputs = kind.inputs(model, 13, padded=kind.masked)
    model.save_pretrained(tmp_path)
    loaded = load_attached(tmp_path, transformers.AutoModel, dtype=torch.float64)
    assert_same([run(loaded, inputs)[0]], [run(model, inputs)[0]])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", SERVED)
def test_copies_are_whole_and_apart(name, duplicate):
    kind = SERVED[name]
    model = attach(kind.make(), "none")
    inputs = kind.inputs(model, 13, padded=kind.masked)
    expected = run(model, inputs)[0]
    other = duplicate(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same([run(other, inputs)[0], run(detach(other), inputs)[0]], [expected, expected])


@pytest.mark.parametrize("name", SERVED)
def test_detaching_restores_every_layer(name):
    model = SERVED[name].make()
    before = [sorted(vars(module)) for module in model.modules()], list(model.state_dict()), model.config.to_dict()
    with pytest.raises(InputError, match="tsia"):
        attach(model, "tsia")
    for _ in range(2):
        after = [sorted(vars(module)) for module in model.modules()], list(model.state_dict()), model.config.to_dict()
        assert after == before
        detach(attach(model, "none"))


@pytest.mark.parametrize("name", SERVED)
def test_weights_are_real(name):
    kind = SERVED[name]
    model = kind.make(attn_implementation="eager")
    inputs = kind.inputs(model, 13, padded=kind.masked)
    expected = model(**inputs, output_attentions=True).attentions
    found = attach(model, "none")(**inputs, output_attentions=True).attentions
    assert len(found) == len(expected)
    real = slice(None) if "attention_mask" not in inputs else slice(0, 1)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[real], other[real], rtol=1e-5, atol=1e-6)  # some eager softmaxes are float32


@pytest.mark.parametrize("name", SERVED)
def test_own_positions_that_cannot_be_switched_off_are_refused(name):
    model = SERVED[name].make()
    with pytest.raises(InputError, match=r"^keep_absolute: \w+ computes positions in its attention, which stay"):
        attach(model, "none", keep_absolute=False)
