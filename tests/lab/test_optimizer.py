"""What optimizers and schedules compute, and which parameters decay or have a learning rate of their own."""

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from tests.models.test_encoder import small_config
from whereformer import Encoder
from whereformer.lab.optimizer import SCHEDULES, build_optimizer, build_schedule


def settings(model, **options):
    """Learning rate and weight decay of every parameter, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, 1e-3, weight_decay=0.1, **options).param_groups
    pairs = [(names[id(p)], (group["lr"], group["weight_decay"])) for group in groups for p in group["params"]]
    assert sorted(name for name, _ in pairs) == sorted(names.values())  # each of them once
    return dict(pairs)


@pytest.mark.parametrize("position", ["learned", "shaw", "tupe", "transformer_xl"])
def test_matrices_of_the_backbone_decay_and_position_does_not(position):
    model = Encoder(small_config(position=position))
    for name, (rate, decay) in settings(model).items():
        parameter = model.get_parameter(name)
        assert rate == 1e-3
        assert decay == (0.1 if parameter.dim() > 1 and not name.startswith("position.") else 0.0), name


@pytest.mark.parametrize("position", ["tisa", "learned+tisa"])
def test_tisas_kernels_have_their_own_learning_rate(position):
    by_name = settings(Encoder(small_config(position=position)), kernel_learning_rate=0.5)
    for name, (rate, _) in by_name.items():
        assert rate == (0.5 if name.rpartition(".")[2] in ("amplitude", "sharpness", "center") else 1e-3)


def shares(name, warmup, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    factor = build_schedule(optimizer, name, warmup, steps).lr_lambdas[0]
    return [factor(step) for step in range(steps + 1)]


@pytest.mark.parametrize(
    ("name", "theirs"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_schedules_are_transformers_after_a_warm_up_that_starts_above_zero(name, theirs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    expected = theirs(optimizer, num_warmup_steps=10, num_training_steps=100).lr_lambdas[0]
    actual = shares(name, 10, 100)
    assert actual[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert actual[10:] == pytest.approx([expected(step) for step in range(10, 101)], abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (3, 3), (10, 3)])
def test_short_trainings_move_at_every_step(name, warmup, steps):
    assert all(0 < share <= 1 for share in shares(name, warmup, steps)[:-1])
