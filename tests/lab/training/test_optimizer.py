"""Which parameters decay, and which have a learning rate of their own: position methods say it, the optimizer asks."""

import pytest
import torch

from tests.models.test_encoder import small_config
from whereformer import Encoder, positions
from whereformer.lab.training.optimizer import build_optimizer
from whereformer.positions import ModelShape, Position


class Decaying(Position):
    """A toy with a matrix that decays, a kernel, and a number that is neither."""

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.matrix = torch.nn.Parameter(torch.ones(2, 2))
        self.kernel = torch.nn.Parameter(torch.ones(3, 3))
        self.number = torch.nn.Parameter(torch.ones(1))

    def decayed_parameters(self):
        return (self.matrix,)

    def kernel_parameters(self):
        return (self.kernel,)


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


@pytest.mark.parametrize("name", ["decaying", "decaying+learned"])
def test_a_method_says_what_decays_and_what_its_kernels_are(name, monkeypatch):
    monkeypatch.setitem(positions.METHODS, "decaying", Decaying)
    found = settings(Encoder(small_config(position=name)), kernel_learning_rate=0.5)
    own = {key.rpartition(".")[2]: value for key, value in found.items() if key.startswith("position.")}
    assert own["matrix"] == (1e-3, 0.1)
    assert own["kernel"] == (0.5, 0.0)
    assert own["number"] == (1e-3, 0.0)
