"""ELECTRA: sampling, judging and counting; and what its two models share, in memory, on disk and in training."""

import json
import math
from collections import Counter

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.models.peers import enlarge, refused
from tests.models.test_encoder import small_config
from whereformer import Electra, ElectraPretrainingConfig, EncoderConfig, EncoderForPreTraining, load_pretrained
from whereformer.models.electra import sample

MASK = 4
SHARED = ["word.weight", "token_type.weight", "norm.weight", "norm.bias"]


def build(**changes):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "embedding_size": 16, "position": "tisa"}
    return Electra(small_config(ElectraPretrainingConfig, **{**sizes, **changes})).eval()


def batch():
    """Three rows of nine tokens, the first with three of padding; five targets, one of them left as it is."""
    torch.manual_seed(1)
    original = torch.randint(5, 50, (3, 9))
    mask = torch.ones_like(original)
    mask[0, 6:] = 0
    original[0, 6:] = 0
    targets = torch.zeros_like(original, dtype=torch.bool)
    targets[0, 2] = targets[0, 5] = targets[1, 1] = targets[2, 4] = targets[2, 8] = True
    masked = original.masked_fill(targets, MASK)
    masked[1, 1] = original[1, 1]
    inputs = {
        "input_ids": masked,
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, 2, (3, 9)),
        "labels": original.masked_fill(~targets, -100),
    }
    return inputs, original


def embeddings(model):
    return [dict(part.encoder.embeddings.named_parameters()) for part in (model.discriminator, model.generator)]


def test_losses_and_shares_are_what_they_say():
    model = build(discriminator_weight=7.0)
    inputs, original = batch()
    out = model(**inputs)
    targets, real = inputs["labels"] != -100, inputs["attention_mask"].bool()
    kwargs = {name: inputs[name] for name in ("attention_mask", "token_type_ids")}

    logits = model.generator.head(model.generator.encoder(inputs["input_ids"], **kwargs).last_hidden_state)[targets]
    chances = logits.softmax(-1)[torch.arange(5), original[targets]]
    torch.testing.assert_close(out.generator_logits, logits)
    torch.testing.assert_close(out.generator_loss, -chances.log().mean())

    scores = model.discriminator(out.sampled_ids, **kwargs).logits
    is_original = out.sampled_ids == original
    chances = torch.where(is_original, scores.sigmoid(), 1 - scores.sigmoid())[real]
    torch.testing.assert_close(out.discriminator_logits, scores)
    torch.testing.assert_close(out.discriminator_loss, -chances.log().mean())
    torch.testing.assert_close(out.loss, out.generator_loss + 7 * out.discriminator_loss)

    right = [bool(scores[index] > 0) == bool(is_original[index]) for index in zip(*real.nonzero().T, strict=True)]
    recalls = [bool(scores[index] <= 0) for index in zip(*(real & ~is_original).nonzero().T, strict=True)]
    assert recalls
    assert out.accuracy.item() == pytest.approx(sum(right) / len(right))
    assert out.replaced_recall.item() == pytest.approx(sum(recalls) / len(recalls))


def test_samples_replace_targets_alone_and_differ():
    model = build()
    inputs, original = batch()
    targets = inputs["labels"] != -100
    samples = [model(**inputs).sampled_ids for _ in range(5)]
    assert all(torch.equal(ids[~targets], original[~targets]) for ids in samples)
    assert len({tuple(ids[targets].tolist()) for ids in samples}) > 1
    # The target that was not masked is replaced too.
    assert any(ids[1, 1] != original[1, 1] for ids in samples)


def test_samples_come_from_the_generators_distribution():
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 20000
    counts = Counter(sample(chances.log().expand(count, 4)).tolist())
    for token, chance in enumerate(chances.tolist()):
        assert abs(counts[token] / count - chance) < 4 * math.sqrt(chance * (1 - chance) / count)


def test_a_sample_that_is_the_original_counts_as_original():
    model = build()
    inputs, original = batch()
    sure = model.generator.head.decoder.bias
    sampled = original.clone()
    sampled[0, 2] = original[0, 2] % 49 + 1
    out = model(**inputs, sampled_ids=sampled)
    kwargs = {name: inputs[name] for name in ("attention_mask", "token_type_ids")}
    labels = torch.ones_like(original)
    labels[0, 2] = 0
    torch.testing.assert_close(out.discriminator_loss, model.discriminator(sampled, labels=labels, **kwargs).loss)
    assert torch.equal(out.sampled_ids, sampled)
    # A generator that is sure samples what it is sure of.
    inputs["labels"] = inputs["labels"].clamp(max=7)
    with torch.no_grad():
        sure[7] = 1e4
    out = model(**inputs)
    targets = inputs["labels"] != -100
    assert (out.sampled_ids[targets] == 7).all()


def test_nothing_replaced_is_nothing_to_find():
    model = build()
    inputs, original = batch()
    out = model(**inputs, sampled_ids=original)
    assert out.replaced_recall.isnan()
    assert torch.isfinite(out.loss)


def test_padding_is_in_no_loss():
    model = build()
    inputs, original = batch()
    sampled = original.clone()
    sampled[0, 2] = 7
    expected = model(**inputs, sampled_ids=sampled)
    inputs["input_ids"][0, 6:] = 33
    sampled[0, 6:] = torch.tensor([34, 33, 33])
    out = model(**inputs, sampled_ids=sampled)
    for name in ("loss", "generator_loss", "discriminator_loss", "accuracy", "replaced_recall"):
        torch.testing.assert_close(out[name], expected[name])


def test_no_gradient_passes_through_the_samples_and_both_reach_what_is_shared():
    model = build()
    inputs, _ = batch()
    table, generator_table = model.discriminator.encoder.embeddings, model.generator.encoder.embeddings
    out = model(**inputs)
    shared = [table.word.weight, table.token_type.weight, table.norm.weight, table.norm.bias]
    generator = torch.autograd.grad(out.generator_loss, shared, retain_graph=True)
    discriminator = torch.autograd.grad(out.discriminator_loss, shared, retain_graph=True)
    assert all(gradient.abs().max() > 0 for gradient in generator + discriminator)
    rest = generator_table.projection.weight
    assert torch.autograd.grad(out.discriminator_loss, rest, retain_graph=True, allow_unused=True) == (None,)
    out.loss.backward()
    for parameter, generator_gradient, discriminator_gradient in zip(shared, generator, discriminator, strict=True):
        torch.testing.assert_close(parameter.grad, generator_gradient + 50 * discriminator_gradient)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name


def test_embeddings_are_shared_and_nothing_else():
    model = build(position="learned")
    discriminator, generator = embeddings(model)
    for name in SHARED:
        assert generator[name] is discriminator[name]
    assert generator["projection.weight"].shape == (8, 16)
    assert discriminator["projection.weight"].shape == (32, 16)
    assert model.generator.head.decoder.weight is discriminator["word.weight"]
    assert model.generator.encoder.position.weight is not model.discriminator.encoder.position.weight
    names = [name for name, _ in model.named_parameters()]
    assert not [name for name in names if name.startswith("generator.encoder.embeddings") and "projection" not in name]


@pytest.mark.parametrize(
    ("size", "expected"), [(0.25, (8, 32, 1)), (0.5, (16, 64, 2)), (1.0, (32, 128, 4)), (0.01, (1, 1, 1))]
)
def test_the_generator_is_narrower_and_as_deep(size, expected):
    config = small_config(
        ElectraPretrainingConfig, hidden_size=32, num_attention_heads=4, generator_size=size, blocks="2x2"
    )
    generator = config.generator_config()
    assert (generator.hidden_size, generator.intermediate_size, generator.num_attention_heads) == expected
    same = ("blocks", "decoder_layers", "head_dim", "embedding_size", "vocab_size", "position", "lm_head")
    assert all(getattr(generator, name) == getattr(config, name) for name in same)
    assert config.hidden_size == 32
    assert not config.sparse_prediction
    if size >= 0.25:
        assert torch.isfinite(build(generator_size=size)(**batch()[0]).loss)


def loaded_whole(kind, folder):
    """A saved model, in which nothing is missing and nothing left over."""
    model, loading_info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info.values())
    return model.eval()


def test_saving_and_loading_changes_nothing(tmp_path):
    model = enlarge(build(position="learned"), 0.01)
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == dict(model.named_parameters()).keys()

    pretrained, (_, original) = load_pretrained(tmp_path), batch()
    assert type(pretrained) is EncoderForPreTraining
    assert torch.equal(pretrained(original).logits, model.discriminator(original).logits)
    pretrained.save_pretrained(tmp_path / "kept")
    assert without_what_electra_has(tmp_path / "kept")
    loaded = loaded_whole(Electra, tmp_path)
    for (name, ours), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    discriminator, generator = embeddings(loaded)
    assert all(generator[name] is discriminator[name] for name in SHARED)
    assert loaded.generator.head.decoder.weight is discriminator["word.weight"]
    inputs, original = batch()
    torch.testing.assert_close(loaded(**inputs, sampled_ids=original).loss, model(**inputs, sampled_ids=original).loss)


def test_pretraining_can_go_on_from_a_discriminator(tmp_path):
    model = build()
    model.discriminator.save_pretrained(tmp_path)
    loaded, loading_info = Electra.from_pretrained(tmp_path, output_loading_info=True)
    assert all(name.startswith("generator.") for name in loading_info["missing_keys"])
    assert not loading_info["unexpected_keys"]
    discriminator, generator = embeddings(loaded)
    assert torch.equal(discriminator["word.weight"], embeddings(model)[0]["word.weight"])
    assert all(generator[name] is discriminator[name] for name in SHARED)


def without_what_electra_has(folder):
    """Whether a saved model's configuration is an encoder's, without ELECTRA's options."""
    config = json.loads((folder / "config.json").read_text())
    return config["model_type"] == "whereformer" and not {"generator_size", "discriminator_weight"} & config.keys()


def test_only_electra_has_its_options(tmp_path):
    model = build(generator_size=0.5, discriminator_weight=7.0)
    for name, part in {"discriminator": model.discriminator, "generator": model.generator}.items():
        assert type(part.config) is EncoderConfig
        assert not hasattr(part.config, "generator_size")
        part.save_pretrained(tmp_path / name)
        assert without_what_electra_has(tmp_path / name)
    model.save_pretrained(tmp_path / "both")
    loaded = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "both")
    assert type(loaded) is Electra
    assert (loaded.config.generator_size, loaded.config.discriminator_weight) == (0.5, 7.0)
    with pytest.raises(TypeError, match=r"^config: expected an ElectraPretrainingConfig, got EncoderConfig"):
        Electra(small_config())
    with pytest.raises(ValueError, match=r"^generator_size: expected 0\.001 to 1000, got 0"):
        build(generator_size=0)
    for name, limits in (("generator_size", "0.001 to 1000"), ("discriminator_weight", "at least 0")):
        for bad in (-0.5, float("nan")):
            with pytest.raises(ValueError, match=f"^{name}: expected {limits}, got {bad}$"):
                build(**{name: bad})


def test_the_vocabulary_grows_for_both():
    model = build()
    model.resize_token_embeddings(60, mean_resizing=False)
    discriminator, generator = embeddings(model)
    assert generator["word.weight"] is discriminator["word.weight"]
    assert model.generator.head.decoder.weight is discriminator["word.weight"]
    assert model.config.vocab_size == model.generator.config.vocab_size == model.discriminator.config.vocab_size == 60
    inputs, _ = batch()
    inputs["labels"][0, 2] = 59
    out = model(**inputs)
    assert out.generator_logits.shape == (5, 60)
    assert torch.isfinite(out.loss)


def test_trainer_trains_evaluates_and_resumes(tmp_path):
    torch.manual_seed(0)
    inputs, _ = batch()
    rows = [{name: value[row] for name, value in inputs.items()} for row in range(3)]
    model = build()

    def trainer(steps):
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=3,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            report_to="none",
            use_cpu=True,
            save_steps=20,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        return transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)

    before = model.eval()(**inputs)
    trainer(20).train()
    after = model.eval()(**inputs)
    assert after.generator_loss < before.generator_loss - 0.5
    checkpoint = tmp_path / "checkpoint-20"
    assert (checkpoint / "model.safetensors").exists()
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    model = build()
    resumed = trainer(20)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    discriminator, generator = embeddings(model)
    assert all(generator[name] is discriminator[name] for name in SHARED)
    assert resumed.evaluate()["eval_loss"] > 0


def test_bfloat16_runs_with_losses_in_float32():
    model = build()
    inputs, original = batch()
    expected = model(**inputs, sampled_ids=original)
    out = model.bfloat16()(**inputs, sampled_ids=original)
    assert out.generator_logits.dtype == out.discriminator_logits.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.loss, expected.loss, rtol=0.02, atol=0.02)
    assert torch.isfinite(model(**inputs).loss)


def test_errors_name_the_argument():
    model = build()
    inputs, original = batch()
    labels = inputs.pop("labels")
    with pytest.raises(TypeError, match="labels"):
        model(**inputs)
    with pytest.raises(ValueError, match=r"labels: expected shape \(3, 9\), got \(3, 8\)"):
        model(**inputs, labels=labels[:, 1:])
    with pytest.raises(ValueError, match=r"labels: expected at least one target, got -100 everywhere"):
        model(**inputs, labels=torch.full_like(labels, -100))
    with pytest.raises(ValueError, match=r"sampled_ids: expected shape \(3, 9\), got \(2, 9\)"):
        model(**inputs, labels=labels, sampled_ids=original[1:])
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(3, 9\), got \(3, 8\)"):
        model(**{**inputs, "attention_mask": inputs["attention_mask"][:, 1:]}, labels=labels)
    with pytest.raises(ValueError, match=r"tie_word_embeddings: .* share their embeddings, got False"):
        build(tie_word_embeddings=False)
    with refused(r"^generator_size: no .* 0.25 times .*: lm_head: 'tied' needs .* use lm_head='bert'"):
        build(lm_head="tied", embedding_size=32)
    build(lm_head="tied", embedding_size=32, generator_size=1)
    with refused(r"^generator_size: no generator 0.05 times as wide can be built: hidden_size: .* 1$"):
        build(position="transformer_xl", generator_size=0.05)
