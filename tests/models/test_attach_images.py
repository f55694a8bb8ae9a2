"""Methods over grids, attached to image models of transformers."""

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from whereformer import OffsetBias2d, attach, detach, load_attached
from whereformer.errors import InputError
from whereformer.kernels import grids

from .test_attach import by_hand, close, make, switch, train_step

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 4,
}
ROWS, COLUMNS = 5, 3
IMAGES = {
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=(20, 12))),
    "deit": lambda: transformers.DeiTModel(transformers.DeiTConfig(**SIZES, image_size=(20, 12))),
    "beit": lambda: transformers.BeitModel(
        transformers.BeitConfig(**SIZES, image_size=(20, 12), use_mask_token=False, use_relative_position_bias=False)
    ),
}
PREFIX = {"vit": 1, "deit": 2, "beit": 1}
METHODS = ("tisa2d", "grid_bias")


def image_model(name):
    torch.manual_seed(0)
    return make(IMAGES[name]())


def images():
    return {"pixel_values": torch.randn(2, 3, 20, 12, generator=torch.Generator().manual_seed(1))}


def hidden(model):
    return model(**images()).last_hidden_state


def strengthen(position):
    with torch.no_grad():
        for parameter in position.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", IMAGES)
def test_the_grid_is_the_models_and_a_table_of_zeros_adds_nothing(name, method):
    model = image_model(name)
    expected = hidden(model)
    attach(model, method)
    position = model.whereformer
    assert (position.rows, position.columns, position.prefix) == (ROWS, COLUMNS, PREFIX[name])
    strengthen(position)
    assert (hidden(model) - expected).abs().max() > 1e-3
    for parameter in (position.prefix_bias, position.weight if method == "grid_bias" else position.amplitude):
        nn.init.zeros_(parameter)
    close(hidden(model), expected)
    detach(model)
    close(hidden(model), expected)


def scores_of(position, layer):
    """What a method adds to each pair, from its docstring: (1, heads, n, n)."""
    n, prefix = ROWS * COLUMNS, position.prefix
    cell = torch.arange(n)
    row, column = ((part[None] - part[:, None]) for part in (cell // COLUMNS, cell % COLUMNS))
    if hasattr(position, "weight"):
        cells = position.weight[layer][:, row + ROWS - 1, column + COLUMNS - 1]
    else:
        cells = 0
        for kernel in range(position.amplitude.shape[2]):
            amplitude, sharpness = (each[layer, :, kernel] for each in (position.amplitude, position.sharpness))
            center = position.center[layer, :, kernel, :, None, None]
            distance = (row - center[:, 0]) ** 2 + (column - center[:, 1]) ** 2
            cells = cells + amplitude[:, None, None] * (-sharpness.abs()[:, None, None] * distance).exp()
    whole = nn.functional.pad(cells, (prefix, 0, prefix, 0))
    before = (torch.arange(n + prefix) < prefix).float()
    kinds = before[:, None] * (1 - before), (1 - before)[:, None] * before, before[:, None] * before
    numbers = position.prefix_bias[layer]
    return (whole + sum(numbers[:, kind, None, None] * pairs for kind, pairs in enumerate(kinds))).unsqueeze(0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["vit", "deit"])
def test_each_layer_adds_its_own_numbers_and_gets_their_gradients(name, method):
    ours, theirs = image_model(name), image_model(name)
    attach(ours, method)
    strengthen(ours.whereformer)
    biases = []

    def attend(*args, **options):
        return by_hand(iter([biases.pop(0)]))(*args, **options)

    AttentionInterface.register("by_hand", attend)
    AttentionMaskInterface.register("by_hand", eager_mask)
    switch(theirs, "by_hand")

    def run():
        biases.extend(scores_of(ours.whereformer, layer) for layer in range(3))
        out = hidden(theirs)
        assert not biases
        return out

    ours_out, theirs_out = hidden(ours), run()
    close(ours_out, theirs_out)
    parameters = list(ours.whereformer.parameters())
    weights = torch.arange(ours_out.numel()).view_as(ours_out).cos()
    found, expected = (torch.autograd.grad((out * weights).sum(), parameters) for out in (ours_out, theirs_out))
    for each, other in zip(found, expected, strict=True):
        assert (each.flatten(1).abs().amax(1) > 0).all()
        torch.testing.assert_close(each, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_saves_and_loads(method, keep, tmp_path):
    model = attach(image_model("vit"), method, keep_absolute=keep)
    strengthen(model.whereformer)
    model.save_pretrained(tmp_path)
    loaded = load_attached(tmp_path, transformers.AutoModel)
    assert loaded.config.whereformer == {"position": method, "keep_absolute": keep, "options": {}}
    torch.testing.assert_close(hidden(loaded), hidden(model), rtol=0, atol=0)


def test_trains_a_step_at_a_time():
    model = attach(image_model("vit"), "tisa2d", keep_absolute=False)
    optimizer = torch.optim.Adam(model.whereformer.parameters(), 0.05)
    losses = []
    for _ in range(4):
        losses.append(train_step(model, images())[0])
        optimizer.step()
    assert losses[-1] < losses[0]


def test_it_is_a_table_and_no_matrix(monkeypatch):
    """All layers hand attention a term over offsets."""
    seen = []
    merged = grids.merged
    monkeypatch.setattr(grids, "merged", lambda terms, dtype: seen.append(list(terms)) or merged(terms, dtype))
    hidden(attach(image_model("vit"), "tisa2d"))
    assert [[type(term) for term in terms] for terms in seen] == [[OffsetBias2d]] * 3


def test_joined_with_a_method_in_a_row():
    model = attach(image_model("vit"), "tisa2d+tisa")
    assert torch.isfinite(hidden(model)).all()


def test_a_grid_that_is_not_the_models_is_refused():
    message = r"^rows: expected a prefix and rows x columns of 16 tokens, got 1 and 4 x 3, which are 13$"
    with pytest.raises(InputError, match=message):
        attach(image_model("vit"), "tisa2d", rows=4)
    model = attach(image_model("vit"), "tisa2d", rows=3, columns=5)
    assert (model.whereformer.rows, model.whereformer.columns, model.whereformer.prefix) == (3, 5, 1)


def test_windows_are_refused():
    config = transformers.SwinConfig(image_size=56, patch_size=4, embed_dim=6, depths=[1], num_heads=[3])
    message = (
        r"^position: 'tisa2d' needs all patches of an image in one sequence; this model has 14 x 14 patches and seq"
    )
    with pytest.raises(InputError, match=message):
        attach(transformers.SwinModel(config), "tisa2d")


@pytest.mark.parametrize("size", [(40, 40), (8, 8), (8, 32)], ids=str)
@pytest.mark.parametrize("kind", ["ViT", "Dinov2"])
def test_an_image_of_another_size_is_refused(kind, size):
    """Fewer patches, or as many in other rows, would fit the grid and have wrong offsets."""
    config = getattr(transformers, f"{kind}Config")(**SIZES, image_size=16)
    model = attach(getattr(transformers, f"{kind}Model")(config), "grid_bias")
    options = {"interpolate_pos_encoding": True} if kind == "ViT" else {}
    image = torch.randn(1, 3, *size)
    for call in (lambda: model(image, **options), lambda: model(pixel_values=image, **options)):
        with pytest.raises(
            InputError, match=rf"^pixel_values: expected images of 16 x 16, .*, got {size[0]} x {size[1]}$"
        ):
            call()
    detach(model)(image, **options)


def test_a_model_inside_refuses_an_image_of_another_size_too():
    """The stack of Dinov2 is an encoder, which gets no images."""
    config = transformers.Dinov2Config(**SIZES, image_size=16)
    model = attach(transformers.Dinov2ForImageClassification(config), "grid_bias")
    with pytest.raises(InputError, match=r"^pixel_values: expected images of 16 x 16, .*, got 8 x 8$"):
        model.dinov2(torch.randn(1, 3, 8, 8))


def test_a_text_model_has_a_square_by_default():
    sizes = {name: size for name, size in SIZES.items() if name != "patch_size"}
    bert = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50, max_position_embeddings=40))
    attach(bert, "tisa2d")
    assert (bert.whereformer.rows, bert.whereformer.columns, bert.whereformer.length) == (6, 7, 40)
