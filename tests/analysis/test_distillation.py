"""Position embeddings into kernels: planted curves come back, layer by layer."""

import pytest
import torch

from benchmarks.distillation import distill_positions, fit_curves, offset_curves
from whereformer import Encoder, EncoderConfig
from whereformer.analysis.toeplitz import diagonal_sums


def encoder(position, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "blocks": "2", "type_vocab_size": 0}
    options = {"max_position_embeddings": 24, **options}
    return Encoder(EncoderConfig(**sizes, position=position, **options)).eval()


def planted():
    """A model whose position is kernels already, and the same with fresh ones."""
    teacher, student = (encoder("tisa", position_options={"num_kernels": 2}) for _ in range(2))
    with torch.no_grad():
        teacher.position.amplitude.copy_(torch.tensor([[[3.0, -2.0], [2.0, 1.0]], [[-2.0, 1.5], [4.0, 1.0]]]))
        teacher.position.sharpness.copy_(torch.tensor([[[0.3, 0.05], [1.0, 0.02]], [[0.1, 0.5], [0.4, 0.1]]]))
        teacher.position.center.copy_(torch.tensor([[[-1.0, 4.0], [1.0, 0.0]], [[0.0, -3.0], [2.0, -5.0]]]))
    student.load_state_dict(
        {**teacher.state_dict(), **{f"position.{k}": v for k, v in student.position.state_dict().items()}}
    )
    return teacher, student


def test_planted_kernels_come_back_and_so_do_all_states():
    teacher, student = planted()
    windows = torch.randint(50, (8, 20))
    fit = distill_positions(teacher, student, windows)
    assert (fit.explained > 0.999).all()
    offsets = torch.arange(-12, 13)
    for layer in range(2):
        expected, actual = (model.position.curve(offsets, layer=layer) for model in (teacher, student))
        # Up to a constant, which no softmax sees.
        centered = [curve - curve.mean(-1, keepdim=True) for curve in (expected, actual)]
        torch.testing.assert_close(*centered, rtol=0, atol=0.02)
    with torch.no_grad():
        new_windows = torch.randint(50, (4, 20))
        torch.testing.assert_close(
            student(new_windows).last_hidden_state, teacher(new_windows).last_hidden_state, rtol=0, atol=0.02
        )


def test_embeddings_become_kernels_that_give_heads_their_curves_back():
    teacher = encoder("learned")
    with torch.no_grad():
        # Sines and cosines, of which a head sees whole pairs, so that scores depend on the distance.
        angles = torch.arange(24.0)[:, None] * torch.linspace(0.1, 1.0, 16)
        teacher.position.weight.copy_(torch.cat((angles.sin(), angles.cos()), 1))
        teacher.embeddings.word.weight.normal_()
        pairs = torch.arange(32).view(2, 2, 8).transpose(0, 1).flatten()
        for layer in teacher.layers:
            for part in (layer.attention.query, layer.attention.key):
                part.weight.copy_(1.5 * torch.eye(32)[pairs])
    state = {name: tensor for name, tensor in teacher.state_dict().items() if not name.startswith("position.")}
    student, dropped = encoder("tisa", position_options={"num_kernels": 4}), encoder("none")
    for model in (student, dropped):
        model.load_state_dict(state, strict=False)
    with torch.no_grad():
        distill_positions(teacher, student, torch.randint(50, (32, 20)))
    new_windows = torch.randint(50, (32, 20))
    # Up to 12 tokens away; there are few pairs farther apart.
    expected, without, actual = (offset_curves(model, new_windows)[..., 7:32] for model in (teacher, dropped, student))
    assert (actual - expected).abs().mean() < 0.15 * (without - expected).abs().mean()


def test_curves_of_a_model_without_content_are_the_methods_own():
    model = encoder("tisa")
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.query.weight.zero_()
            layer.attention.query.bias.zero_()
        curves = offset_curves(model, torch.randint(50, (3, 10)), batch_size=2)
        for layer in range(2):
            expected = model.position.curve(torch.arange(-9, 10), layer=layer).double()
            torch.testing.assert_close(curves[layer], expected - expected.mean(-1, keepdim=True), rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_curve_is_that_of_a_regression_on_offsets_and_rows(n):
    logs = torch.randn(3, 2, n, n, dtype=torch.float64).log_softmax(-1)
    curves = fit_curves(diagonal_sums(logs - logs.mean(-1, keepdim=True)).sum(0), len(logs))
    index = torch.arange(n)
    offset = (index[None] - index[:, None] + n - 1).expand(3, n, n).flatten()
    row = torch.arange(3 * n).view(3, n, 1).expand(3, n, n).flatten()
    design = torch.cat([torch.nn.functional.one_hot(part).double() for part in (offset, row)], 1)
    for head, curve in enumerate(curves):
        expected = torch.linalg.lstsq(design, logs[:, head].flatten()[:, None], driver="gelsd").solution[: 2 * n - 1, 0]
        torch.testing.assert_close(curve, expected - expected.mean(), rtol=0, atol=1e-9)


def test_models_that_do_not_fit_each_other_are_refused():
    with pytest.raises(ValueError, match="student: expected position 'tisa' with kernels in every layer"):
        distill_positions(encoder("learned"), encoder("none"), torch.zeros(1, 4, dtype=torch.int64))
    deeper = Encoder(
        EncoderConfig(vocab_size=50, hidden_size=32, num_attention_heads=2, blocks="3", position="learned")
    )
    with pytest.raises(ValueError, match="student: expected the teacher's 3 layers, got 2"):
        distill_positions(deeper, encoder("tisa"), torch.zeros(1, 4, dtype=torch.int64))
