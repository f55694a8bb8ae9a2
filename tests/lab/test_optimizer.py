"""What optimizers and schedules compute, and which parameters decay or have a learning rate of their own."""

import copy
from functools import partial

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup, get_wsd_schedule

from tests.models.test_encoder import small_config
from whereformer import Encoder, EncoderForMaskedLM
from whereformer.lab.optimizer import BETAS, SCHEDULES, build_optimizer, build_schedule


def settings(model, **options):
    """Learning rate and weight decay of every parameter, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, 1e-3, weight_decay=0.1, **options).param_groups
    found = [(names[id(p)], (group["lr"], group["weight_decay"])) for group in groups for p in group["params"]]
    assert sorted(name for name, _ in found) == sorted(names.values())  # each of them once
    return dict(found)


@pytest.mark.parametrize("position", ["learned", "shaw", "tupe", "transformer_xl"])
def test_matrices_of_the_backbone_decay_and_position_does_not(position):
    model = Encoder(small_config(position=position))
    for name, (rate, decay) in settings(model).items():
        parameter = model.get_parameter(name)
        assert rate == 1e-3
        assert decay == (0.1 if parameter.dim() > 1 and not name.startswith("position.") else 0.0), name


@pytest.mark.parametrize("position", ["tisa", "learned+tisa"])
def test_tisas_kernels_have_their_own_learning_rate(position):
    found = settings(Encoder(small_config(position=position)), kernel_learning_rate=0.5)
    for name, (rate, _) in found.items():
        assert rate == (0.5 if name.rpartition(".")[2] in ("amplitude", "sharpness", "center") else 1e-3)


def test_muon_decays_the_same_parameters():
    model = Encoder(small_config(position="learned+tisa"))
    assert settings(model, name="muon", kernel_learning_rate=0.5) == settings(model, kernel_learning_rate=0.5)


@pytest.mark.parametrize("position", ["learned", "shaw", "tupe"])
def test_muon_trains_the_matrices_of_layers_alone(position):
    model = EncoderForMaskedLM(small_config(position=position))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, *adamw = build_optimizer(model, 1e-3, name="muon").param_groups
    matrices = {names[id(parameter)] for parameter in muon["params"]}
    layer = ["attention.query", "attention.key", "attention.value", "attention.out", "up", "down"]
    layers = len(model.encoder.layers)
    assert matrices == {f"encoder.layers.{number}.{part}.weight" for number in range(layers) for part in layer}
    assert {names[id(each)] for group in adamw for each in group["params"]} == set(names.values()) - matrices


def trained(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_muon_and_adamw_in_one_are_what_they_are_apart():
    torch.manual_seed(0)
    model = Encoder(small_config(position="learned"))
    apart = copy.deepcopy(model)
    together = trained(model, build_optimizer(model, 1e-3, name="muon"), 3)
    groups = build_optimizer(apart, 1e-3, name="muon").param_groups
    muon = torch.optim.Muon(groups[0]["params"], lr=1e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    rest = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups[1:]]
    trained(apart, muon, 3)
    alone = trained(apart, torch.optim.AdamW(rest, lr=1e-3, betas=BETAS, fused=True), 3)
    assert all(torch.equal(together[name], alone[name]) for name in together)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_saved_state_continues_to_the_bit(name, tmp_path):
    torch.manual_seed(0)
    model = Encoder(small_config(position="learned+tisa"))
    optimizer = build_optimizer(model, 1e-3, name=name)
    trained(model, optimizer, 2)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed = copy.deepcopy(model)
    other = build_optimizer(resumed, 1e-3, name=name)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for group in (*optimizer.param_groups, *other.param_groups):
        group["lr"] = 5e-4  # as a schedule does
    whole, again = trained(model, optimizer, 2, seed=1), trained(resumed, other, 2, seed=1)
    assert all(torch.equal(whole[each], again[each]) for each in whole)


def shares(name, warmup, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    factor = build_schedule(optimizer, name, warmup, steps).lr_lambdas[0]
    return [factor(step) for step in range(steps + 1)]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("linear", get_linear_schedule_with_warmup),
        ("cosine", get_cosine_schedule_with_warmup),
        ("wsd", partial(get_wsd_schedule, num_decay_steps=20, decay_type="1-sqrt")),
    ],
)
def test_schedules_are_transformers_after_a_warm_up_that_starts_above_zero(name, theirs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    expected = theirs(optimizer, num_warmup_steps=10, num_training_steps=100).lr_lambdas[0]
    found = shares(name, 10, 100)
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert found[10:] == pytest.approx([expected(step) for step in range(10, 101)], abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (3, 3), (10, 3)])
def test_short_trainings_move_at_every_step(name, warmup, steps):
    assert all(0 < share <= 1 for share in shares(name, warmup, steps)[:-1])
