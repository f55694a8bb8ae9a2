"""Words with classes, from columns of lists, of texts and of spans; and their classes on tokens, against tokenizers."""

import json
import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from whereformer.data.masks import IGNORED
from whereformer.data.tokenizers import fit_tokenizer
from whereformer.data.words import WordTask, labeled_words, on_tokens
from whereformer.errors import InputError

TEXT = "Ada Lovelace, born in London, wrote notes."
SPANS = [{"start": 22, "end": 28, "label": "city"}, {"start": 0, "end": 12, "label": "person"}]


def test_words_come_from_lists_texts_and_spans():
    assert labeled_words(["a b", "c"], [3, "O"]) == (("a b", "c"), ["3", "O"])
    assert labeled_words(" a  b\nc", "x O x") == (("a", "b", "c"), ["x", "O", "x"])
    words, classes = labeled_words(TEXT, SPANS)
    assert words == ("Ada", "Lovelace", ",", "born", "in", "London", ",", "wrote", "notes.")
    assert classes == ["B-person", "I-person", "O", "O", "O", "B-city", "O", "O", "O"]
    assert labeled_words("no span", []) == (("no", "span"), ["O", "O"])
    assert labeled_words("xLondon", [{"start": 1, "end": 7, "label": "city"}]) == (("x", "London"), ["O", "B-city"])


@pytest.mark.parametrize(
    ("text", "label", "told"),
    [
        (["a", "b"], ["x"], "a class for each of 2 words, got 1"),
        (["a"], None, "expected a list of classes, or of spans in a text, got None"),
        (["a"], [1.5], "expected a list of classes"),
        (["a"], [True], "expected a list of classes"),
        ([1], ["x"], "expected a text or a list of words, got [1]"),
        (None, ["x"], "expected a text or a list of words, got None"),
        ([], [], "expected at least one word, got none"),
        ("  ", [], "expected at least one word, got none"),
        ("abc", [{"start": 0, "end": 4, "label": "x"}], "within the 3 characters"),
        ("abc", [{"start": 2, "end": 2, "label": "x"}], "expected a span as {start, end, label}"),
        ("abc", [{"start": 0, "end": 2}], "expected a span as {start, end, label}"),
        (
            "abcd",
            [{"start": 0, "end": 3, "label": "x"}, {"start": 2, "end": 4, "label": "y"}],
            "spans that don't overlap",
        ),
    ],
)
def test_other_rows_are_refused(text, label, told):
    with pytest.raises(ValueError, match="expected") as refused:
        labeled_words(text, label)
    assert told in str(refused.value)


def bert(texts):
    return fit_tokenizer(texts, 60)


def byte_level(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=320, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


SAID = ["the cat, the dog and the bird's nest", "a king met a queen; they talked", "fish - and chips!"]


@pytest.mark.parametrize("made", [bert, byte_level, metaspace])
@settings(deadline=None, max_examples=60)
@given(words=st.lists(st.text("abcdehkt,'-!", min_size=1, max_size=6), min_size=1, max_size=8))
def test_a_word_labels_the_first_token_that_has_one_of_its_characters(made, words):
    tokenizer = made(SAID)
    encoded = tokenizer(" ".join(words), return_offsets_mapping=True)
    labels = on_tokens(words, range(len(words)), encoded["offset_mapping"])
    # By characters, without the pointer: which word is each character of, and which word is new in each token?
    of_character = [place for place, word in enumerate(words) for _ in word + " "]
    spaces = {place for place, letter in enumerate(" ".join(words)) if letter == " "}
    seen, expected = set(), []
    for start, stop in encoded["offset_mapping"]:
        touched = [of_character[place] for place in range(start, stop) if place not in spaces]
        new = [word for word in touched if word not in seen]
        expected.append(new[0] if new else IGNORED)
        seen |= set(new[:1])
    assert labels == expected


def test_words_without_tokens_have_no_label():
    places = [(0, 0), (0, 2), (3, 5), (9, 11), (0, 0)]
    words = ["ab", "cd", "", "xy", "z"]  # "ab cd  xy z": neither "" nor "xy" nor "z" is one of the tokens
    assert on_tokens(words, [1, 2, 3, 4, 5], places) == [IGNORED, 1, 2, 5, IGNORED]


def save(folder, name, tokens, tags):
    parquet.write_table(pa.table({"tokens": tokens, "tags": tags}), folder / f"{name}.parquet")
    return folder / f"{name}.parquet"


def test_a_task_from_tables(tmp_path):
    train = save(tmp_path, "train", [["a", "b"], ["c"], ["d", "e"]], [["O", "B-x"], ["O"], ["B-x", "I-x"]])
    judged = save(tmp_path, "judged", [["a"]], [["B-x"]])
    data = WordTask(train, judged, "tokens", "tags").load()
    assert data.task.classes == ("B-x", "I-x", "O")
    assert data.task.metrics == ("span_f1", "span_precision", "span_recall")
    assert list(data.train.texts) == [("a", "b"), ("c",), ("d", "e")]
    assert data.train.labels == [[2, 0], [2], [0, 1]]
    assert data.facts.rows == {"train": 3, "validation": 1}
    part = WordTask(train, judged, "tokens", "tags").load(2)
    assert (len(part.train.labels), part.facts.subsets) == (2, ["train"])
    assert part.facts.fingerprint != data.facts.fingerprint
    lines = "tokens\ttags\na b\t1 2\nc\t10\n"
    for name in ("train", "judged"):
        (tmp_path / f"{name}.tsv").write_text(lines)
    data = WordTask(tmp_path / "train.tsv", tmp_path / "judged.tsv", "tokens", "tags").load()
    assert (data.task.classes, data.task.metrics) == (("1", "2", "10"), ("accuracy", "macro_f1"))
    assert data.judged[""].labels == [[0, 1], [2]]


def test_the_same_rows_with_other_classes_are_other_rows(tmp_path):
    judged = save(tmp_path, "judged", [["a"]], [["x"]])
    hashes = [
        WordTask(save(tmp_path, "train", [["a", "b"]], [tags]), judged, "tokens", "tags").load().facts.fingerprint
        for tags in (["x", "y"], ["y", "x"], ["x", "z"])
    ]
    assert len(set(hashes)) == 3


def test_bad_tables_are_named(tmp_path):
    good = save(tmp_path, "good", [["a", "b"]], [["x", "y"]])
    short = save(tmp_path, "short", [["a"], ["a", "b"]], [["x"], ["x"]])
    other = save(tmp_path, "other", [["a"]], [["z"]])
    one = save(tmp_path, "one", [["a"]], [["x"]])
    none = save(tmp_path, "none", pa.array([], pa.list_(pa.string())), pa.array([], pa.list_(pa.string())))

    def refused(train, validation, label="tags"):
        with pytest.raises(InputError) as error:
            WordTask(train, validation, "tokens", label).load()
        return str(error.value)

    assert refused(short, good) == f"train: {short}, row 1: expected a class for each of 2 words, got 1"
    assert refused(good, other) == f"validation: {other}: expected one of the training rows' classes, x, y, got 'z'"
    assert refused(one, good) == f"label: expected at least two classes in {one}, got x"
    assert refused(none, good) == f"train: {none}: expected at least one row, got none"
    assert "expected a column 'kind', found tokens, tags" in refused(good, good, "kind")


def test_json_lines_hold_spans(tmp_path):
    row = json.dumps({"text": TEXT, "spans": SPANS})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n{json.dumps({'text': 'nothing here', 'spans': []})}\n")
    data = WordTask(tmp_path / "rows.jsonl", tmp_path / "rows.jsonl", "text", "spans").load()
    assert data.task.classes == ("B-city", "B-person", "I-person", "O")
    assert [len(row) for row in data.train.texts] == [9, 2]
    random.Random(0).shuffle(SPANS)
    assert labeled_words(TEXT, SPANS)[1][0] == "B-person"
