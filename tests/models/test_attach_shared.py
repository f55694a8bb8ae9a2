"""``attach`` writes only into what is the model's own: models may share a configuration, and hooks are a user's."""

import copy

import pytest
import torch
import transformers
from torch import nn

from whereformer import attach, detach, load_attached, unpad
from whereformer.models.attachment.trial_run import HOOKS

from .peers import SIZES, close, everything
from .test_attach_verify import ALL
from .test_clients import WORDS, save

BERT = {"position": "tisa", "keep_absolute": True, "options": {}}


def test_two_models_that_share_a_configuration_get_a_method_each(tmp_path):
    config = transformers.BertConfig(**SIZES)
    one, sibling = (transformers.BertModel(config).eval() for _ in range(2))
    fields = copy.deepcopy(vars(config))
    ids = torch.randint(3, 50, (2, 9))
    before = sibling(ids)[0]
    attach(one, "tisa")
    assert vars(config) == fields
    assert one.config.whereformer == BERT
    assert torch.equal(sibling(ids)[0], before)
    attach(sibling, "none")
    one.save_pretrained(tmp_path)
    again = load_attached(tmp_path, transformers.BertModel).eval()
    assert again.config.whereformer == BERT
    assert torch.equal(again(ids)[0], one(ids)[0])
    detach(one)
    close(sibling(ids)[0], before)
    detach(sibling)
    assert one.config is sibling.config is config
    assert vars(config) == fields
    assert torch.equal(sibling(ids)[0], before)


def make_llava():
    text = transformers.LlamaConfig(**SIZES, num_key_value_heads=1)
    sizes = {name: size for name, size in SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=16)
    return transformers.LlavaModel(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=49)
    ).eval()


@pytest.mark.parametrize("name", [*ALL, "llava"])
def test_all_modules_and_parts_get_the_copies(name):
    """Encoders, decoders, towers and layers hold configurations at many places; each place gets the copy of its own."""
    model = make_llava() if name == "llava" else ALL[name]()
    before = everything(model)
    held = {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, transformers.PreTrainedConfig)
    }
    fields = {id(config): copy.deepcopy(vars(config)) for config in held.values()}
    attach(model, "none")
    copies = {key: vars(model.get_submodule(key[0]))[key[1]] for key in held}
    for key, config in held.items():
        assert copies[key] is not config
        assert vars(config) == fields[id(config)]
        for sibling, shared in held.items():
            assert (copies[key] is copies[sibling]) == (config is shared)
    if name == "llava":
        assert copies["", "config"].text_config is copies["language_model", "config"]
    detach(model)
    assert everything(model) == before


def test_what_a_user_changes_while_a_method_is_attached_stays():
    """The embeddings stay longer after detach, so the configuration has to say so."""
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    config, old = model.config, copy.deepcopy(vars(model.config))
    attach(model, "tisa")
    model.resize_token_embeddings(60, mean_resizing=False)
    model.config.kind = {"of": "text"}
    detach(model)
    assert model.config is config
    assert vars(config) == {**old, "vocab_size": 60, "kind": {"of": "text"}}
    assert model.embeddings.word_embeddings.num_embeddings == 60


# Hooks


class Counts:
    """A hook with a state that must not be copied, either."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *_, **__):
        self.calls += 1

    def __deepcopy__(self, memo):
        raise AssertionError("a hook was copied")


def add_hooks(module, counts):
    module.register_forward_pre_hook(counts)
    module.register_forward_pre_hook(counts, with_kwargs=True, prepend=True)
    module.register_forward_hook(counts)
    module.register_forward_hook(counts, with_kwargs=True, always_call=True)
    module.register_full_backward_pre_hook(counts)
    module.register_full_backward_hook(counts)


@pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", ["bert", "albert", "t5", "llama", "deberta"])
def test_the_users_hooks_see_no_batch_that_they_made_not(name, verify):
    model, counts = ALL[name](), Counts()
    for module in model.modules():
        add_hooks(module, counts)
    before = everything(model)
    attach(model, "none", verify=verify)
    detach(model)
    assert counts.calls == 0
    assert everything(model) == before
    hooks = [[*vars(module)[name].values()] for module in model.modules() for name in HOOKS]
    assert {*map(len, hooks)} == {1, 2}
    attach(model, "none", verify=verify)
    ids = torch.randint(3, 50, (1, 5))
    inputs = {"decoder_input_ids": ids} if name == "t5" else {}
    model(ids, **inputs)
    assert counts.calls > 4


def test_hooks_that_compute_weights_run():
    """Those of a weight norm are part of the model."""
    model = ALL["bert"]()
    layer = model.encoder.layer[0].output.dense
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(layer)
    del layer.weight  # only its hook makes it
    detach(attach(model, "none"))


def test_unpad_leaves_hooks_alone(tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    config, counts = transformers.BertConfig(**SIZES | {"vocab_size": len(WORDS)}), Counts()
    client = library.SentenceTransformer(save(transformers.BertModel(config), tmp_path), device="cpu")
    add_hooks(attach(client[0].auto_model, "tisa"), counts)
    unpad(client)
    assert counts.calls == 0
