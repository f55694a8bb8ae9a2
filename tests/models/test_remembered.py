"""What is remembered of calls and of tables: the same bits as without memories, and nothing stale."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import whereformer.kernels
from tests.kernels.cases import need_native
from tests.kernels.test_plan_cache import without_memories
from whereformer import Encoder, EncoderConfig, position_names
from whereformer.kernels import remember
from whereformer.positions import tables
from whereformer.positions.deberta import Deberta
from whereformer.positions.kerple import Kerple
from whereformer.positions.t5 import T5
from whereformer.positions.tisa import Tisa
from whereformer.positions.transformer_xl import TransformerXL

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "blocks": "2"}
SIZES |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(autouse=True)
def _memories():
    need_native()
    remember(True)
    yield
    remember(True)


def encoder(name):
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(position=name, **SIZES))
    for parameter in model.position.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def results_of(model, dtype, training):
    """The output for some tokens, and all gradients in training."""
    ids = torch.arange(36).view(2, 18) % 50
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"), torch.set_grad_enabled(training):
        output = model(ids).last_hidden_state
    if not training:
        return [output]
    return [output, *torch.autograd.grad(output.float().square().sum(), list(model.parameters()), allow_unused=True)]


def are_equal(actual, expected):
    return all(x is y is None or torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", position_names())
def test_every_method_is_remembered_and_gives_the_bits_of_a_call_that_is_not(name, dtype, monkeypatch):
    model = encoder(name).to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    for training in (True, False):
        first = results_of(model.train(training), dtype, training)
        with monkeypatch.context() as patch:
            patch.delattr(whereformer.kernels, "make_call")
            later = results_of(model, dtype, training)
        with without_memories():
            expected = results_of(model, dtype, training)
        assert are_equal(first, expected)
        assert are_equal(later, expected)


METHODS = ["deberta", "transformer_xl", "t5", "tisa", "kerple"]


@pytest.fixture
def projections(monkeypatch):
    """Notes each time that a layer's tables are computed."""
    counted = []
    methods = (
        (Deberta, "_build_terms"),
        (TransformerXL, "_tables"),
        (T5, "curve"),
        (Tisa, "_curves"),
        (Kerple, "_penalty"),
    )
    for kind, name in methods:
        usual = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, usual=usual, **kw: counted.append(1) or usual(*args, **kw))
    return counted


def output_of(model, length=18, **options):
    ids = torch.arange(2 * length).view(2, length) % 50
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, **{"enabled": False, **options}):
        return model(ids).last_hidden_state


def stepped(model):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def loaded(model):
    state = {name: 1.5 * tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    model.load_state_dict(state, strict=False)


def in_place(model):
    with torch.no_grad():
        for parameter in model.position.parameters():
            parameter.mul_(1.25)


def replaced(model):
    """Memory that is freed and used again does not make new numbers old ones."""
    for factor in (3.0, 1.25):
        for parameter in model.position.parameters():
            parameter.data = parameter.data * factor


def written_and_trained(model):
    for parameter in model.position.parameters():
        parameter.data.mul_(1.25)
    model(torch.arange(5)[None])


def parametrized(model):
    class Larger(torch.nn.Module):
        def forward(self, weight):
            return 1.25 * weight

    for name, _ in list(model.position.named_parameters()):
        torch.nn.utils.parametrize.register_parametrization(model.position, name, Larger())


CHANGES = {
    "an optimizer's step": stepped,
    "load_state_dict": loaded,
    "in place": in_place,
    "other memory": replaced,
    "what torch does not count, and a forward with gradients": written_and_trained,
    "new values": lambda model: model.position.reset_parameters(),
    "parametrization": parametrized,
    "another dtype": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_makes_tables_new(name, change, projections):
    model = encoder(name).eval()
    before = output_of(model)
    assert torch.equal(output_of(model), before)
    assert len(projections) == (2 if name in ("deberta", "transformer_xl") else 1)  # each layer once, or all at once
    CHANGES[change](model)
    output = output_of(model)
    with without_memories():
        assert torch.equal(output_of(model), output)
    assert not torch.equal(output, before)


@pytest.mark.parametrize("name", METHODS)
def test_what_tables_depend_on_beside_weights(name, projections):
    model = encoder(name).eval()
    for length in (18, 19, 18, 1, 2):
        for autocast in (False, True, False):
            output = output_of(model, length, enabled=autocast)
            with without_memories():
                assert torch.equal(output_of(model, length, enabled=autocast), output)
    with torch.inference_mode():
        output = output_of(model)
    assert torch.equal(output_of(model), output)
    results_of(model, "float32", True)  # what inference mode made has no place in a graph
    model.position.content_scale = lambda site: 0.3
    output = output_of(model)
    with without_memories():
        assert torch.equal(output_of(model), output)


@pytest.mark.parametrize("name", METHODS)
def test_copies_and_replaced_parameters_have_tables_of_their_own(name, projections):
    model = encoder(name).eval()
    before, twin = output_of(model), copy.deepcopy(model)
    in_place(twin)
    changed = output_of(twin)
    assert not torch.equal(changed, before)
    assert torch.equal(output_of(model), before)
    parameters = {f"position.{key}": parameter.detach() for key, parameter in twin.position.named_parameters()}
    with torch.no_grad():
        ids = torch.arange(36).view(2, 18) % 50
        output = torch.func.functional_call(model, parameters, (ids,)).last_hidden_state
    assert torch.equal(output, changed)
    assert torch.equal(output_of(model), before)


# A method that computes tables of vectors for each layer, and one that computes the curves of all layers at once.
QUICK = ("transformer_xl", "tisa")


@pytest.mark.parametrize("name", [pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in METHODS])
def test_programs_hold_no_tables(name, projections):
    model = encoder(name).eval()
    before = output_of(model)
    torch.compiler.reset()  # too many methods for one program
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(output_of(compiled), before)
        exported = torch.export.export(model, (torch.arange(36).view(2, 18) % 50,)).module()
    in_place(model)
    changed = output_of(model)
    assert not torch.equal(changed, before)
    torch.testing.assert_close(output_of(compiled), changed)
    with torch.no_grad():
        for parameter, source in zip(exported.parameters(), model.parameters(), strict=True):
            parameter.copy_(source)
    torch.testing.assert_close(output_of(exported), changed, rtol=1e-4, atol=1e-4)


def test_dropout_of_sinusoids_draws_again():
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(position="transformer_xl", position_options={"dropout": 0.5}, **SIZES)).train()
    torch.nn.init.normal_(model.position.kernel)
    assert not torch.equal(output_of(model), output_of(model))
    model.eval()
    assert torch.equal(output_of(model), output_of(model))


def test_tables_live_no_longer_than_their_method():
    model = encoder("deberta").eval()
    output_of(model)
    memory = weakref.ref(tables._memories[model.position])
    assert set(memory().values) == {"vectors", 0, 1}
    results_of(model, "float32", True)
    assert not memory().values
    del model
    gc.collect()
    assert memory() is None


def test_threads_share_tables():
    model = encoder("transformer_xl").eval()
    expected = {length: output_of(model, length) for length in (5, 18)}

    def results(number):
        length = (5, 18)[number % 2]
        return all(torch.equal(output_of(model, length), expected[length]) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(results, range(8)))
