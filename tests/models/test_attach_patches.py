"""Models with positions of their own, and models of sound: ``attach`` keeps what they compute, without matrices."""

import copy
import pickle

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from whereformer import attach, detach
from whereformer.errors import InputError
from whereformer.positions.tisa import Tisa

from .checkpointing import checkpoint_activations
from .patched import INKLING, KINDS, PATCHED
from .peers import attach_unverified, refused

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask:UserWarning")


def run(model, inputs):
    """The hidden states of real tokens, and the gradients of every parameter."""
    model.zero_grad()
    out = model(**inputs)
    hidden = out.logits if "logits" in out else out.last_hidden_state
    mask = None if model.config.is_encoder_decoder else getattr(out, "attention_mask", inputs.get("attention_mask"))
    if mask is not None:
        if mask.shape[1] != hidden.shape[1]:
            mask = model._get_feature_vector_attention_mask(hidden.shape[1], mask)
        hidden = hidden[mask.bool()]
    (hidden * torch.arange(hidden.numel()).double().cos().view_as(hidden)).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual, expected, tolerance=1e-10):
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, rtol=tolerance, atol=tolerance)


class Largest(TorchDispatchMode):
    """Records the largest number of entries that an operation returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                self.entries = max(self.entries, tensor.numel())
        return out


QUICK = {"Wav2Vec2Bert", "WavLM", "DebertaV2"}
SOME = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PATCHED]
"""All, of which the quick tests run a few: what they check does not depend on a model's positions."""


@pytest.mark.parametrize("length", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 13])
@pytest.mark.parametrize(
    ("name", "padded"),
    [
        # Padding is what a mask of all True is not.
        pytest.param(name, padded, marks=() if padded == kind.masked or name in QUICK else pytest.mark.slow)
        for name, kind in KINDS.items()
        for padded in (False, True)
    ],
)
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
    actual, actual_gradients = run(model, inputs)
    assert actual_gradients.keys() == gradients.keys()
    scale = max(gradient.abs().max() for gradient in gradients.values())
    pairs = ([values[key] / scale for key in gradients] for values in (actual_gradients, gradients))
    for tensor, expected_tensor in ((actual, expected), *zip(*pairs, strict=True)):
        assert_same([tensor], [expected_tensor], kind.tolerance)
    assert_same([run(detach(model), inputs)[0]], [expected])


@pytest.mark.parametrize("name", SOME)
def test_no_tensor_has_a_number_for_every_pair(name):
    """Twice as many tokens have at most twice as many numbers, forward and backward."""
    kind = PATCHED[name]
    if "chunks" in name:
        pytest.skip("its masks are matrices")
    entries = []
    for factor in (1, 2):
        model = kind.make()
        # Parakeet makes a matrix of its padding, once for all layers.
        inputs = kind.inputs(model, 96 * factor, padded=kind.masked and kind.name != "ParakeetEncoder")
        attach_unverified(model, "none")
        with Largest() as largest:
            run(model, inputs)
        entries.append(largest.entries)
    assert entries[1] <= 1.1 * 2 * entries[0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_layers_can_run_again_for_their_gradients(name, reentrant):
    kind = PATCHED[name]
    model = attach_unverified(kind.make(), "none")
    if (reentrant and not kind.reentrant) or not model.supports_gradient_checkpointing:
        pytest.skip("transformers cannot checkpoint it so")
    inputs = kind.inputs(model, 13, padded=kind.masked)
    expected = run(model, inputs)
    checkpoint_activations(model, use_reentrant=reentrant)
    model.train()
    actual = run(model, inputs)
    model.eval()
    if not any(isinstance(module, torch.nn.BatchNorm1d) for module in model.modules()):
        assert_same([actual[0], *actual[1].values()], [expected[0], *(expected[1][key] for key in actual[1])])


@pytest.mark.parametrize("name", SOME)
def test_a_method_is_added_to_the_models_own_positions(name):
    kind = PATCHED[name]
    model = kind.make()
    inputs = kind.inputs(model, 13, padded=kind.masked)
    expected = run(model, inputs)[0]
    attach_unverified(model, "tisa")
    parts = [module for module in model.modules() if isinstance(module, Tisa)]
    with torch.no_grad():
        for part in parts:
            part.amplitude.add_(1.0)
    changed, gradients = run(model, inputs)
    assert (changed - expected).abs().max() > 1e-3
    for key, gradient in gradients.items():
        assert not key.endswith("whereformer.amplitude") or (gradient.flatten(1).abs().amax(1) > 0).all()
    with torch.no_grad():
        for part in parts:
            part.amplitude.zero_()
    assert_same([run(model, inputs)[0]], [expected], kind.tolerance)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", SOME)
def test_copies_are_whole_and_apart(name, duplicate):
    kind = PATCHED[name]
    model = attach_unverified(kind.make(), "none")
    inputs = kind.inputs(model, 13, padded=kind.masked)
    expected = run(model, inputs)[0]
    try:
        copied = duplicate(model)
    except RuntimeError as error:
        pytest.skip(str(error))  # PyTorch does not pickle weights that are norms and directions
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same([run(copied, inputs)[0]], [expected])
    assert_same([run(detach(copied), inputs)[0]], [expected], kind.tolerance)


@pytest.mark.parametrize("name", SOME)
def test_weights_are_real(name):
    kind = PATCHED[name]
    if kind.name == "WavLM" or "chunks" in name:
        pytest.skip("transformers has means over heads, or adds masks of True and False to scores")
    model = kind.make(attn_implementation="eager")
    inputs = kind.inputs(model, 13, padded=kind.masked)
    which = "encoder_attentions" if model.config.is_encoder_decoder else "attentions"
    expected = model(**inputs, output_attentions=True)[which]
    # The proof has padding, with which the eager attention of some does something else than the other ones.
    actual = attach_unverified(model, "none")(**inputs, output_attentions=True)[which]
    assert len(actual) == len(expected)
    real = slice(None) if "attention_mask" not in inputs else slice(0, 1)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours[real], theirs[real], rtol=1e-5, atol=1e-6)  # some eager softmaxes are float32


@pytest.mark.parametrize("name", SOME)
def test_own_positions_that_cannot_be_switched_off_are_refused(name):
    model = PATCHED[name].make()
    with pytest.raises(InputError, match=r"^keep_absolute: \w+ computes positions inside its attention; keep_abs"):
        attach(model, "none", keep_absolute=False)


def test_scores_that_no_term_can_say_are_refused():
    model = PATCHED["Deberta"].make(talking_head=True)
    with pytest.raises(InputError, match=r"talking_head: it mixes the scores of heads, which terms cannot express$"):
        attach(model, "none")
    kind = PATCHED["Parakeet"]
    model = attach(kind.make(dropout_positions=0.5), "none")
    inputs = kind.inputs(model, 13, padded=False)
    run(model, inputs)
    with pytest.raises(InputError, match=r"^dropout_positions: each row would have different positions; set it to 0"):
        run(model.train(), inputs)


@pytest.mark.parametrize("name", ["Deberta", "DebertaV2"])
def test_distances_of_another_kind_are_refused(name):
    model = attach_unverified(PATCHED[name].make(), "none")
    hidden, mask = torch.randn(1, 4, 16).double(), torch.ones(1, 4)
    for argument, value in (("relative_pos", torch.zeros(1, 4, 4)), ("query_states", hidden)):
        with refused(rf"^{argument}: not supported by whereformer's attention, and may change scores; .* passed a"):
            model.encoder(hidden, mask, **{argument: value})


@pytest.mark.parametrize("name", ["Deberta", "DebertaV2"])
def test_masks_of_pairs_stay_what_they_are(name):
    """Two texts in a row, which do not see each other."""
    model = PATCHED[name].make()
    ids = torch.randint(3, 50, (1, 9))
    texts = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    inputs = {"input_ids": ids, "attention_mask": (texts[:, None] == texts).unsqueeze(0).long()}
    hidden = model.embeddings(ids)
    expected = model.encoder(hidden, inputs["attention_mask"]).last_hidden_state
    attach_unverified(model, "none")
    assert_same([model.encoder(hidden, inputs["attention_mask"]).last_hidden_state], [expected])


def test_inkling_generates_with_a_cache():
    torch.manual_seed(0)
    config = transformers.InklingTextConfig(**INKLING.options)
    model = transformers.InklingForCausalLM(config).eval()
    ids = torch.randint(3, 50, (2, 7))
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    assert torch.equal(attach_unverified(model, "none").generate(ids, **options), expected)


@pytest.mark.parametrize("name", SOME)
def test_half_precision(name):
    kind = PATCHED[name]
    model = kind.make()
    inputs = kind.inputs(model, 13, padded=kind.masked)
    attach_unverified(model, "none").to(torch.bfloat16)
    halves = {key: x.to(torch.bfloat16) if x.is_floating_point() else x for key, x in inputs.items()}
    hidden, gradients = run(model, halves)
    assert hidden.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Wav2Vec2Bert", "DebertaV2"])
def test_it_compiles(name):
    torch.compiler.reset()
    kind = PATCHED[name]
    model = attach_unverified(kind.make(), "none")
    inputs = kind.inputs(model, 13, padded=kind.masked)
    expected = model(**inputs).last_hidden_state
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same([compiled(**inputs).last_hidden_state], [expected])


@torch.no_grad()
def test_debertas_scores_do_not_overflow_in_float16():
    """Products with vectors of offsets pass 65,504 before transformers divides them by the root of the width."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 2}
    options = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "norm_rel_ebd": "layer_norm"}
    options |= {
        "share_att_key": True,
        "position_buckets": 4,
        "max_relative_positions": 9,
        "position_biased_input": False,
    }
    model = transformers.DebertaV2Model(transformers.DebertaV2Config(**sizes, **options, intermediate_size=64)).eval()
    for layer in model.encoder.layer:
        for projection in (layer.attention.self.query_proj, layer.attention.self.key_proj):
            torch.nn.init.eye_(projection.weight).mul_(90)
    ids, real = torch.randint(8, 50, (2, 12)), torch.arange(12) < torch.tensor([[12], [7]])
    inputs = {"input_ids": ids, "attention_mask": real.long()}
    expected = model(**inputs).last_hidden_state[real]
    model.half()
    assert model(**inputs).last_hidden_state[real].isnan().any()
    states = attach_unverified(model, "none")(**inputs).last_hidden_state[real]
    assert (states.float() - expected).abs().max() < 0.01 * expected.abs().max()
