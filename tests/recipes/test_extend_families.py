"""whereformer extend with the sentence encoders that people have: a tiny one of each family, its files and settings."""

import io
import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

import whereformer
from tests.failing import fails
from whereformer.data.tokenizers import fit_tokenizer
from whereformer.errors import InputError
from whereformer.lab.loading import quiet_transformers
from whereformer.lab.sentence_encoders import find_position_table, lengthen, load_encoder, save_encoder
from whereformer.models import Encoder, EncoderConfig
from whereformer.recipes.extend import distance

from .sentence_models import MODULES, SIZES, WORDS, bert, save, save_documents

LIMIT, LENGTH = 32, 80
SHORT, LONG = "the cat saw the dog", WORDS[:800]
# By family of tokenizers: the ids of special tokens in a sentencepiece model, and their names.
ALBERT = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3, "bos_piece": "[CLS]", "eos_piece": "[SEP]"}
DEBERTA = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]", "bos_piece": "[CLS]"}
PIECES = {
    "XLMRoberta": ("sentencepiece.bpe.model", {}),
    "Albert": ("spiece.model", {**ALBERT, "control_symbols": ["[MASK]"]}),
    "DebertaV2": ("spm.model", {**DEBERTA, "eos_piece": "[SEP]", "unk_piece": "[UNK]", "control_symbols": ["[MASK]"]}),
}
ROBERTA = {"pad_token_id": 1, "max_position_embeddings": 66}
DISTANCES = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
# What is not as in SIZES; pooling, whether there is a Normalize, and prompts; what is pooled of those.
FAMILIES = {
    "Bert": ({}, "mean_tokens", True, {}),
    "Roberta": (ROBERTA, "cls_token", False, {}),
    "XLMRoberta": (ROBERTA, "mean_tokens", True, {"query": "the cat: ", "passage": "the dog "}),
    "MPNet": (ROBERTA, "mean_tokens", True, {"corpus": "where is the dog? "}),
    "Albert": ({"embedding_size": 8}, "lasttoken", False, {}),
    "ModernBert": (
        {"pad_token_id": 0, "local_attention": 8, "global_attn_every_n_layers": 2, "num_hidden_layers": 3},
        *("cls_token", True, {"document": "the dog "}),
    ),
    "DebertaV2": (
        {**DISTANCES, "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 8},
        *("lasttoken", False, {"document": ""}),
    ),
}


def save_tokenizer(family, folder):
    """Write a family's tokenizer only as its own kind of file, without a tokenizer.json, which ModernBERT has."""
    if family == "ModernBert":
        fit_tokenizer([WORDS], 200).save_pretrained(folder)
        return
    if family in PIECES:
        reason = "needs sentencepiece (pip install sentencepiece)"
        trainer = pytest.importorskip("sentencepiece", reason=reason).SentencePieceTrainer
        file, special = PIECES[family]
        written, lines = io.BytesIO(), iter(WORDS.splitlines())
        trainer.train(sentence_iterator=lines, model_writer=written, vocab_size=46, minloglevel=2, **special)
        (folder / file).write_bytes(written.getvalue())
    elif family == "Roberta":
        trained = tokenizers.ByteLevelBPETokenizer()
        names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        trained.train_from_iterator([WORDS], vocab_size=290, special_tokens=names, show_progress=False)
        trained.save_model(str(folder))
    else:
        vocabulary = list(fit_tokenizer([WORDS], 200).get_vocab().items())
        tokens = [token for token, _ in sorted(vocabulary, key=lambda item: item[1])]
        if family == "MPNet":
            tokens = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>", *tokens[5:]]
        (folder / "vocab.txt").write_text("\n".join(tokens))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": f"{family}Tokenizer"}))


def save_family(family, folder, **pooling):
    """Save a tiny model of a family as sentence-transformers does."""
    changes, mode, normalizes, prompts = FAMILIES[family]
    sizes = {**SIZES, "vocab_size": 300, "max_position_embeddings": 64, "initializer_range": 0.3, **changes}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**sizes))
    save(folder, model, WORDS, LIMIT, MODULES if normalizes else MODULES[:2], mode)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    with quiet_transformers():
        save_tokenizer(family, folder)
    described = json.loads((folder / "1_Pooling" / "config.json").read_text())
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**described, **pooling}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return str(folder)


def check_vectors(encoder, loaded):
    """Compare an encoder's vectors of documents with those of sentence-transformers, alone and in a padded batch."""
    ids = [encoder.ids(text)[: encoder.room] for text in (SHORT, LONG)]
    with torch.no_grad():
        ours = [encoder.pool(encoder.states(encoder.add_special_tokens(torch.tensor([row])))) for row in ids]
    assert (len(ids[0]) < LIMIT // 2, len(ids[1])) == (True, encoder.room)
    theirs = torch.tensor(loaded.encode([SHORT, LONG], prompt=encoder.settings.prompt))
    torch.testing.assert_close(theirs, torch.cat(ours), atol=1e-4, rtol=1e-4)
    alone = torch.tensor(loaded.encode([SHORT], prompt=encoder.settings.prompt))
    torch.testing.assert_close(alone, ours[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "pools_prompt"),
    [
        (family, pools)
        for family, parts in FAMILIES.items()
        for pools in (True, False)
        if pools or any(parts[3].values())
    ],
)
def test_vectors_are_those_of_sentence_transformers_before_and_after(family, pools_prompt, tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    path = save_family(family, tmp_path / "m", include_prompt=pools_prompt)
    teacher = load_encoder(path)
    original = library.SentenceTransformer(path, device="cpu")
    check_vectors(teacher, original)
    student = lengthen(teacher, LENGTH)
    save_encoder(student, Path(path), tmp_path / "longer")
    longer = library.SentenceTransformer(str(tmp_path / "longer"), device="cpu")
    assert (longer.max_seq_length, student.extra) == (LENGTH, teacher.extra)
    check_vectors(student, longer)
    short = [torch.tensor(model.encode([SHORT], prompt=teacher.settings.prompt)) for model in (original, longer)]
    torch.testing.assert_close(*short, atol=1e-5, rtol=1e-5)
    check_vectors(load_encoder(str(tmp_path / "longer")), longer)


def save_ours(folder, position, **changes):
    """Save a model of this library that reads [CLS]."""
    sizes = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"}
    config = EncoderConfig(**sizes, blocks="2", max_position_embeddings=LIMIT, position=position, **changes)
    return save(folder, Encoder(config), WORDS, LIMIT, pooling="cls_token")


def test_a_window_is_never_wider_than_the_models_own(tmp_path):
    student = lengthen(load_encoder(save_family("ModernBert", tmp_path / "m")), LENGTH)
    assert (find_position_table(student.model), student.model.config.windows) == (None, "15,4,0")
    # The last layer of a model that reads [CLS] has no window, unless it had one.
    assert lengthen(load_encoder(save_ours(tmp_path / "local", "rope", windows="0,4")), LENGTH).model.windows == (15, 4)


def test_a_model_without_position_embeddings_is_trained_with_its_prompt(tmp_path):
    """All weights from the first step; the prompt's tokens are read before every document."""
    path = save_family("ModernBert", tmp_path / "m")
    documents = save_documents(tmp_path / "documents.jsonl", WORDS)
    report = whereformer.extend(model=path, data=documents, length=64, steps=3, out=tmp_path / "out", quiet=True)
    before, *_, after = report.values["curve"]
    assert 0.8 < before[1] < 1
    assert (before != after, len(report.values["losses"])) == (True, 3)
    trained = load_encoder(str(tmp_path / "out" / "model"))
    assert trained.before == load_encoder(path).before == [2, *trained.before[1:]]
    assert len(trained.before) == 3


def test_lengths_of_vectors_are_learned_where_a_model_keeps_them():
    vectors, targets = torch.tensor([[2.0, 0.0], [0.6, 0.8]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    torch.testing.assert_close(distance(vectors, targets), torch.tensor([0.5, 1 - 0.6]))


def test_positions_times_eight_are_those_of_transformers(tmp_path):
    """E5-Base-4k: a BERT of 4,096 positions, of which texts of up to 512 tokens get every eighth."""
    short, long, factor = 8, 64, 8
    model = bert(long)
    model.save_pretrained(tmp_path)
    ours = whereformer.load_pretrained(tmp_path)
    for tokens in (5, short, short + 1, long):
        ids = torch.randint(5, 60, (2, tokens), generator=torch.Generator().manual_seed(tokens))
        positions = torch.arange(tokens) * (factor if tokens <= short else 1)
        with torch.no_grad():
            theirs = model.eval()(ids, position_ids=positions[None]).last_hidden_state
            states = ours(ids, position_ids=positions).last_hidden_state
        torch.testing.assert_close(states, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", ["sinusoidal", "tupe", "learned+fire"])
def test_positions_that_end_are_refused(position, tmp_path, capsys):
    line = fails(capsys, "extend", save_ours(tmp_path / "m", position), "--out", str(tmp_path / "out"))
    assert f"MODEL: expected a model with position embeddings or relative positions, got one with '{position}'" in line


def load_with(prompts, folder, **about):
    """Load a BERT with these prompts."""
    path = save_family("Bert", folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts, **about}))
    return load_encoder(path)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["passage: "], "expected texts by name as prompts in config_sentence_transformers.json"),
        ({"q": 3}, "expected texts by name as prompts in config_sentence_transformers.json"),
        ({}, "expected one of the prompts as default_prompt_name"),
        ({"q": "", "document": "the dog " * 20}, "expected one that reads at least 43 tokens, got 32"),
    ],
)
def test_prompts_that_cannot_be_read(prompts, message, tmp_path):
    with pytest.raises(InputError, match=message):
        load_with(prompts, tmp_path / "m", default_prompt_name="q")


def test_a_default_prompt_comes_before_documents_unless_they_have_their_own(tmp_path):
    for name, document, prompt in (("one", {}, "the cat"), ("other", {"passage": "the dog"}, "the dog")):
        encoder = load_with({"q": "the cat", **document}, tmp_path / name, default_prompt_name="q")
        assert encoder.tokenizer.decode(encoder.before) == f"[CLS] {prompt}"


def test_a_sentencepiece_model_that_cannot_be_read(tmp_path):
    """Without sentencepiece, transformers' own error names a program that does not help."""
    path = save_family("Bert", tmp_path / "m")
    (tmp_path / "m" / "vocab.txt").unlink()
    (tmp_path / "m" / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}')
    (tmp_path / "m" / "sentencepiece.bpe.model").write_bytes(b"not a model")
    with pytest.raises(InputError, match=r"its sentencepiece model can't be read; this needs `pip install sentencep"):
        load_encoder(path)
