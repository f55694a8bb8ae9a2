"""rope over rows and columns, attached to image models of transformers."""

import pytest
import torch
import transformers

from whereformer import attach, detach, load_attached
from whereformer.errors import InputError
from whereformer.positions.rope import Rope

from .test_attach import close, make

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 4}
IMAGES = {
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=(20, 12))),
    "deit": lambda: transformers.DeiTModel(transformers.DeiTConfig(**SIZES, image_size=(20, 12))),
    "beit": lambda: transformers.BeitModel(transformers.BeitConfig(**SIZES, image_size=(20, 12), use_mask_token=False)),
}
PREFIX = {"vit": 1, "deit": 2, "beit": 1}
ROPE = {"sections": [2, 2], "arrangement": "axial"}


def image_model(name):
    torch.manual_seed(0)
    return make(IMAGES[name]())


def hidden(model):
    return model(pixel_values=torch.randn(2, 3, 20, 12, generator=torch.Generator().manual_seed(1))).last_hidden_state


@pytest.mark.parametrize("name", IMAGES)
def test_the_grid_is_the_models_and_it_saves_and_loads(name, monkeypatch, tmp_path):
    model = image_model(name)
    expected = hidden(model)
    seen, turns = [], Rope._turns
    monkeypatch.setattr(Rope, "_turns", lambda self, positions: seen.append(positions) or turns(self, positions))
    attach(model, "rope", **ROPE)
    found = hidden(model)
    assert (found - expected).abs().max() > 1e-3
    cells = torch.cartesian_prod(torch.arange(5), torch.arange(3))
    assert torch.equal(seen[0], torch.cat((cells.new_zeros(PREFIX[name], 2), cells))[None])
    model.save_pretrained(tmp_path)
    loaded = load_attached(tmp_path, transformers.AutoModel)
    assert loaded.config.whereformer["options"] == ROPE
    torch.testing.assert_close(hidden(loaded), found, rtol=0, atol=0)
    close(hidden(detach(model)), expected)


def test_tokens_behind_the_patches_are_none_of_the_grid():
    """YOLOS has its detections there."""
    config = transformers.YolosConfig(
        hidden_size=8,
        num_attention_heads=1,
        num_hidden_layers=1,
        intermediate_size=8,
        image_size=[20, 12],
        patch_size=4,
        num_detection_tokens=3,
    )
    cells = torch.cartesian_prod(torch.arange(5), torch.arange(3))
    grid = attach(transformers.YolosModel(config).eval(), "rope", **ROPE).whereformer.grid
    assert torch.equal(grid, torch.cat((cells.new_zeros(1, 2), cells, cells.new_zeros(3, 2)))[None])


def test_methods_of_one_axis_windows_and_layers_of_other_heads_are_refused():
    with pytest.raises(InputError, match=r"^position: Tisa takes positions \(n,\) or \(batch, n\), got \(1, 16, 2\)"):
        attach(image_model("vit"), "rope+tisa", **ROPE)
    sizes = {"image_size": 56, "patch_size": 4, "embed_dim": 8}
    model = transformers.SwinModel(transformers.SwinConfig(**sizes, depths=[1], num_heads=[1]))
    with pytest.raises(InputError, match=r"^position: rope with sections needs all patches .* has 14 x 14 patches and"):
        attach(model, "rope", **ROPE)
    model = transformers.SwinModel(transformers.SwinConfig(**sizes, depths=[1, 1], num_heads=[1, 2]))
    with pytest.raises(InputError, match=r"^position: the layers of \w+ differ in their heads; expected 'none', got"):
        attach(model, "tisa")


@pytest.mark.parametrize("size", [(40, 40), (8, 8), (8, 32)], ids=str)
@pytest.mark.parametrize("kind", ["ViT", "Dinov2"])
def test_an_image_of_another_size_is_refused(kind, size):
    """Fewer patches, or as many in other rows, would fit the grid and have wrong offsets."""
    config = getattr(transformers, f"{kind}Config")(**SIZES, image_size=16)
    model = attach(getattr(transformers, f"{kind}Model")(config), "rope", **ROPE)
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
    model = attach(transformers.Dinov2ForImageClassification(config), "rope", **ROPE)
    with pytest.raises(InputError, match=r"^pixel_values: expected images of 16 x 16, .*, got 8 x 8$"):
        model.dinov2(torch.randn(1, 3, 8, 8))
