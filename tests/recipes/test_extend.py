"""whereformer extend, end to end at a size that takes seconds."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, RobertaConfig, RobertaModel, T5Config, T5EncoderModel

import whereformer
from tests.failing import fails
from whereformer.cli.main import main
from whereformer.errors import InputError
from whereformer.lab.loading import quiet_transformers
from whereformer.lab.run import read_records
from whereformer.lab.sentence_encoders import find_position_table, lengthen, load_encoder, save_encoder
from whereformer.models import Encoder, EncoderConfig
from whereformer.recipes import extend

from .sentence_models import MODULES, SIZES, WORDS, bert, save, save_documents


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "bert", bert(), WORDS)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return save_documents(tmp_path_factory.mktemp("text") / "documents.jsonl", WORDS)


@pytest.fixture(scope="module")
def finished(model, documents, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return out, whereformer.extend(model=Path(model), data=documents, length=48, steps=4, out=out, quiet=True)


def test_what_it_writes_loads_in_sentence_transformers_and_reads_more(finished, model):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    out, report = finished
    loaded = sentence_transformers.SentenceTransformer(str(out / "model"), device="cpu")
    assert loaded.max_seq_length == 48
    assert [type(part).__name__ for part in loaded] == list(MODULES)
    ours = load_encoder(str(out / "model"))
    assert (ours.limit, report.values["limit"]) == (48, 16)
    sentence = "the cat saw the dog " * 20
    ids = ours.tokenizer(sentence, add_special_tokens=False, verbose=False)["input_ids"]
    assert len(ids) > 46
    expected = ours.vectors(torch.tensor([ids[:46]])).detach()
    torch.testing.assert_close(torch.tensor(loaded.encode([sentence])), expected, atol=1e-5, rtol=0)
    assert json.loads((out / "model" / "tokenizer.json").read_text()).get("truncation") is None
    assert AutoTokenizer.from_pretrained(out / "model").model_max_length == 48


def test_the_report_says_what_was_trained(finished):
    out, report = finished
    assert [step for step, *_ in report.values["curve"]] == [0, 1, 2, 3, 4]
    assert len(report.values["losses"]) == 4
    assert 0.9 < report.values["curve"][0][1] < 1
    assert report.values["documents"] == 40
    assert read_records(out / "records.jsonl")[1]['["train"]']["value"]["curve"] == report.values["curve"]
    page = (out / "report.html").read_text()
    assert "The model reads 48 tokens; the original reads 16." in page
    assert not (out / "checkpoints").exists()


MINIMAL = {"max_seq_length": 16, "do_lower_case": True}
WHOLE = MINIMAL | {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}


@pytest.mark.parametrize("reader", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
@pytest.mark.parametrize("settings", [MINIMAL, WHOLE])
def test_the_settings_of_sentence_transformers_are_kept(settings, reader, tmp_path):
    """Lowercase, prompts, similarity and the pooling of prompts; the vectors are those of sentence-transformers."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    folder = tmp_path / "m"
    save(folder, bert(), WORDS)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "sentence_bert_config.json").unlink()
    (folder / reader).write_text(json.dumps(settings))
    (folder / "2_Normalize").mkdir()
    shared = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    pooling = {"embedding_dimension": 16, "pooling_mode": "mean", "include_prompt": False}
    prompts = {"prompts": {"query": "The Cat: ", "document": ""}, "default_prompt_name": None}
    prompts |= {"similarity_fn_name": "dot", "model_type": "SentenceTransformer", "__version__": {}}
    (folder / "2_Normalize" / "config.json").write_text(json.dumps(shared))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    text = "The CAT saw the Dog"
    teacher = load_encoder(str(folder))
    ids = teacher.ids(text)
    assert ids == teacher.ids(text.lower())
    longer = lengthen(teacher, 48)
    target = tmp_path / "longer"
    save_encoder(longer, folder, target)
    theirs, new = (library.SentenceTransformer(str(path), device="cpu") for path in (folder, target))
    for name, vector in (("theirs", theirs), ("new", new)):
        ours = (teacher if name == "theirs" else longer).vectors(torch.tensor([ids])).detach()
        torch.testing.assert_close(torch.tensor(vector.encode([text])), ours, atol=1e-5, rtol=0)
    assert new.prompts == theirs.prompts == prompts["prompts"]
    assert new.similarity_fn_name == "dot"
    assert not new[1].include_prompt
    assert json.loads((target / reader).read_text()) == settings | {"max_seq_length": 48}
    assert not {"is_local", "local_files_only"} & json.loads((target / "tokenizer_config.json").read_text()).keys()
    again = load_encoder(str(target))
    assert (again.ids(text), again.limit) == (ids, 48)


def test_short_texts_have_the_same_vectors(model):
    teacher = load_encoder(model)
    student = lengthen(teacher, 40)
    assert (student.limit, student.model.config.windows) == (40, "7,7")
    short = torch.stack([torch.arange(5, 11), torch.arange(10, 16)])
    torch.testing.assert_close(student.vectors(short), teacher.vectors(short))
    # The original reads 16 tokens, so the rows behind those are not used.
    before, table = find_position_table(teacher.model).weight, find_position_table(student.model).weight
    assert torch.equal(table, torch.cat([before[:16], before[:16], before[:8]]))


def test_a_token_sees_what_is_near_as_in_a_text_of_its_own(model):
    """A token in the middle of the second stretch has the state that it would have between its neighbors alone."""
    teacher = load_encoder(model)
    student = lengthen(teacher, 80)
    ids = torch.randint(5, 60, (1, 80))
    states = student.states(ids)
    # Two layers of windows of 7 reach 14 tokens. Texts may begin at multiples of the 16 positions.
    part = student.states(ids[:, 16:64])
    torch.testing.assert_close(part[:, 14:34], states[:, 30:50])


def test_the_first_token_of_a_roberta_sees_all_in_the_last_layer(tmp_path):
    torch.manual_seed(0)
    roberta = RobertaModel(RobertaConfig(**SIZES, max_position_embeddings=34, pad_token_id=0, initializer_range=0.3))
    teacher = load_encoder(save(tmp_path / "roberta", roberta, WORDS, limit=33, pooling="cls_token"))
    assert (len(find_position_table(teacher.model).weight), teacher.limit, teacher.settings.pooling) == (33, 33, "cls")
    student = lengthen(teacher, 50)
    assert student.model.config.windows == "15,0"
    rows = torch.stack([torch.arange(5, 19), torch.arange(10, 24)])
    torch.testing.assert_close(student.vectors(rows), teacher.vectors(rows))
    long = torch.arange(48) + 5
    reordered = torch.cat([long[:-1], long[:1]])
    assert not torch.allclose(student.vectors(long[None]), student.vectors(reordered[None]), atol=1e-4)
    # Padding on the left counts neither for positions nor for windows.
    padding = 18
    ids = torch.stack([torch.cat([torch.arange(5, 35), torch.zeros(padding, dtype=torch.long)]), long])
    mask = torch.tensor([[1] * 30 + [0] * padding, [1] * 48])
    left = [torch.stack([tensor[0].roll(padding), tensor[1]]) for tensor in (ids, mask)]
    states, expected = (student.model(*inputs).last_hidden_state for inputs in (left, (ids, mask)))
    torch.testing.assert_close(states[0, padding:], expected[0, :-padding])
    torch.testing.assert_close(states[1], expected[1])


def interrupt(monkeypatch, options):
    """Extend an encoder, and interrupt that in the fourth step."""
    steps = iter(range(3))

    def stop(*arguments):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return draw(*arguments)

    draw = extend.draw_batch
    with monkeypatch.context() as patched:
        patched.setattr(extend, "draw_batch", stop)
        with pytest.raises(KeyboardInterrupt):
            whereformer.extend(**options)


def same(one, two):
    """Whether two extensions have the same numbers and weights."""
    models = [load_encoder(str(folder / "model")).model.state_dict() for folder, _ in (one, two)]
    return one[1].values == two[1].values and all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_an_interrupted_run_ends_as_one_that_was_not(finished, model, documents, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    options = {"model": model, "data": documents, "length": 48, "steps": 4, "out": out}
    interrupt(monkeypatch, options)
    with pytest.raises(InputError, match="has results with seed 0, not 1"):
        whereformer.extend(**options, seed=1)
    assert same((out, whereformer.extend(**options)), finished)
    # A finished run is not repeated, unless its model is damaged.
    monkeypatch.setattr(extend, "NEGATIVES", 0)
    assert same((out, whereformer.extend(**options)), finished)
    monkeypatch.undo()
    (out / "model" / "model.safetensors").write_bytes(b"")
    assert same((out, whereformer.extend(**options)), finished)
    assert "repeating train: model.safetensors was changed" in capsys.readouterr().out


def test_another_text_or_model_is_refused(finished, model, documents, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "out")
    other_documents = save_documents(tmp_path / "other.jsonl", WORDS[::-1])
    with pytest.raises(InputError, match="has results for a different text; choose another folder"):
        whereformer.extend(model=model, data=other_documents, length=48, steps=4, out=out, quiet=True)
    bert().half().float().save_pretrained(model)  # other weights at the same path
    with pytest.raises(InputError, match=r"^model: .* has results for a different model; choose another folder"):
        whereformer.extend(model=model, data=documents, length=48, steps=4, out=out, quiet=True)
    bert().save_pretrained(model)


def test_a_loss_that_is_not_finite_is_a_line(model, documents, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(extend, "TEMPERATURE", 0.0)
    line = fails(capsys, "extend", model, "--data", documents, "--length=48", "--steps=2", f"--out={tmp_path / 'out'}")
    assert "MODEL: the loss is not finite (NaN or inf) after 0 steps" in line
    assert not (tmp_path / "out" / "model").exists()


def test_training_brings_documents_near_their_passages(model, documents, tmp_path):
    report = whereformer.extend(model=model, data=documents, length=48, steps=40, out=tmp_path / "out", quiet=True)
    first, last = (sum(report.values["losses"][part]) for part in (slice(8), slice(-8, None)))
    assert last < first


def test_contrast_is_the_softmax_over_documents_and_over_passages():
    documents, passages = torch.eye(2), torch.eye(2).repeat_interleave(extend.PASSAGES, 0)
    negatives, mask = torch.cat([-torch.eye(2), torch.eye(2)]), torch.arange(4) >= 2
    right = 1 / extend.TEMPERATURE
    finding = math.log1p(math.exp(-right))
    wrong = math.log(extend.PASSAGES + 1 + math.exp(-right))
    expected = finding + math.log1p(math.exp(wrong - right))
    assert float(extend.contrast(documents, passages, negatives, mask)) == pytest.approx(expected, rel=1e-3, abs=1e-7)


def test_only_positions_are_trained_at_first(model):
    optimizer, schedule = extend.build_optimizer(load_encoder(model).model, 100)
    rates = []
    for _ in range(31):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    positions, rest = zip(*rates, strict=True)
    assert positions[0] == extend.POSITION_RATE / 5
    assert rest[0] == rest[14] == 0
    assert 0 < rest[15] < rest[30] <= extend.RATE


FUNNEL = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "blocks": "1-1", "position": "transformer_xl"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda to: save(to, bert(), WORDS, modules=("Transformer", "Pooling", "Dense")),
            "got Transformer, Pooling, Dense",
        ),
        (lambda to: save(to, bert(), WORDS, pooling="max_tokens"), "got max"),
        (
            lambda to: save(to, T5EncoderModel(T5Config(vocab_size=64, d_model=16, num_layers=1)), WORDS),
            "got 't5'",
        ),
        (lambda to: save(to, Encoder(EncoderConfig(**FUNNEL)), WORDS), "a model that doesn't pool, got a funnel"),
        (lambda to: quiet_transformers()(bert().save_pretrained)(to) or str(to), " (it has no vocabulary)"),
        (lambda to: str(to), "; `hf download NAME --local-dir FOLDER` gets one"),
        (lambda to: str(Path(save(to / "model", bert(), WORDS)).parent), "; did you mean "),
    ],
)
def test_models_that_cannot_be_extended(make, message, tmp_path, documents, capsys):
    line = fails(capsys, "extend", make(tmp_path / "m"), "--data", documents, "--out", str(tmp_path / "out"))
    assert message in line


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", [], "got none"),
        ("modules.json", ["x"], "expected the modules"),
        ("modules.json", {}, "expected a list"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "got mean, cls"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling by mean or cls or lasttoken, got max"),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, "expected a number of tokens as max_seq_length"),
        ("sentence_bert_config.json", {"max_seq_length": 2}, "reads at least 3 tokens, got 2"),
        ("sentence_bert_config.json", [], "expected a dict"),
        ("sentence_bert_config.json", {"do_lower_case": "yes"}, "expected true or false as do_lower_case"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "as transformer_task in sentence_bert_config"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"image": {}}},
            "expected the last hidden states as modality",
        ),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"max_length": 4}}},
            "as processing_kwargs in sent",
        ),
        ("sentence_bert_config.json", {"model_args": {"dtype": "float16"}}, "as model_args in sentence_bert_config.js"),
        ("sentence_bert_config.json", {"query_length": 8}, "as query_length in sentence_bert_config.json, got 8"),
        ("sentence_bert_config.json", {"new_way": True}, "sentence_bert_config.json has 'new_way', which is not known"),
        ("sentence_roberta_config.json", {"max_seq_length": "x"}, "as max_seq_length in sentence_roberta_config.json"),
        (
            "1_Pooling/config.json",
            {"pooling_mode": "mean", "power": 3},
            "1_Pooling/config.json has 'power', which is n",
        ),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "as module_input_name in 2_Normalize"),
        ("config_sentence_transformers.json", {"model_type": "CrossEncoder"}, "got a CrossEncoder"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "got a SparseEncoder"),
        (
            "config_sentence_transformers.json",
            {"default_prompt_name": "query"},
            "as default_prompt_name in config_sent",
        ),
        ("config_sentence_transformers.json", {"new_way": 1}, "config_sentence_transformers.json has 'new_way', which"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_one_line(name, content, message, tmp_path, documents, capsys):
    path = save(tmp_path / "m", bert(), WORDS)
    if "roberta" in name:
        (tmp_path / "m" / "sentence_bert_config.json").unlink()
    (tmp_path / "m" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "m" / name).write_text(json.dumps(content))
    assert message in fails(capsys, "extend", path, "--data", documents, "--out", str(tmp_path / "out"))


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json", "tokenizer.json", "2_Normalize/config.json"])
def test_a_pipe_in_the_model_is_not_read_and_named_before_any_training(name, tmp_path, documents, capsys, monkeypatch):
    monkeypatch.setattr(extend.Extend, "train", lambda *_: pytest.fail("it trains"))
    path = save(tmp_path / "m", bert(), WORDS)
    (tmp_path / "m" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "m" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "m" / name)
    line = fails(capsys, "extend", path, "--data", documents, "--out", str(tmp_path / "out"))
    assert "expected a file, got a pipe, socket or device" in line


def test_documents_of_unknown_words_are_refused_with_their_share(model, tmp_path, capsys):
    rows = [json.dumps({"text": "Ж" + " Ж" * 80}) for _ in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(rows), encoding="utf-8")
    line = fails(
        capsys, "extend", model, "--data", str(tmp_path / "text.jsonl"), "--length=48", "--out", str(tmp_path / "out")
    )
    assert line.startswith("whereformer: --data: too little to predict in the text: 100.0% of its tokens are [UNK]")


def test_too_few_documents_to_hold_any_out(model, documents, capsys):
    line = fails(capsys, "extend", model, "--data", documents, "--documents", "10")
    assert "documents: expected at least 32, got 10" in line


def test_weights_that_are_not_finite(tmp_path, documents):
    model = bert()
    model.embeddings.word_embeddings.weight.data[7] = math.nan
    with pytest.raises(InputError, match="has numbers that are not finite"):
        whereformer.extend(model=save(tmp_path / "m", model, WORDS), data=documents, out=tmp_path / "out", quiet=True)


def test_text_that_is_too_short(model, documents, tmp_path):
    with pytest.raises(InputError, match="expected at least 32 documents of 2048 tokens, got 0"):
        whereformer.extend(model=model, data=documents, length=2048, out=tmp_path / "out", quiet=True)
    with pytest.raises(InputError, match="expected more than the model's 16 tokens, got 16"):
        whereformer.extend(model=model, data=documents, length=16, out=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out" / "model").exists()


def test_the_command(model, documents, tmp_path, capsys):
    out = tmp_path / "out"
    main(["extend", model, "--data", documents, "--length=24", "--steps=0", "--threads=2", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "passages found" in printed
    assert "SentenceTransformer" in printed
    assert json.loads((out / "records.jsonl").read_text().splitlines()[0])["machine"]["threads"] == 2
