"""Translating: as many lines out as in, in their order, whatever their lengths; and how good they are."""

import io
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.failing import fails, largest_file, refusals
from tests.studies.parallel_text import pairs, train, translated, write
from whereformer import Encoder, EncoderConfig
from whereformer.cli.main import main
from whereformer.lab.training.trainer import quiet_transformers
from whereformer.studies.translate import translating
from whereformer.studies.translate.settings import Decoding

LEARNED = ["--hidden-size=32", "--intermediate-size=64", "--num-heads=4", "--steps=260", "--every=260"]
LEARNED += ["--batch-tokens=1024", "--learning-rate=0.01", "--warmup=60", "--dropout=0", "--average=1"]
LEARNED += ["--position=shaw"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One that has learned its language."""
    folder = tmp_path_factory.mktemp("model")
    train(write(folder, *pairs()), folder / "out", *LEARNED)
    return str(folder / "out" / "model")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """One that knows nothing, with positions that end."""
    folder = tmp_path_factory.mktemp("untrained")
    train(write(folder, *pairs()), folder / "out", "--steps=1", "--position=learned", "--average=1")
    return str(folder / "out" / "model")


@pytest.fixture
def lines(tmp_path):
    def write_lines(*lines, end="\n"):
        file = tmp_path / "lines.txt"
        file.write_bytes("".join(line + end for line in lines).encode())
        return str(file)

    return write_lines


def given(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


SOME = ["where is the cat?", "", "the king saw the queen near the old house.", "   ", "where is the dog?"]


def test_it_has_learned_to_translate(model):
    translator = translating.load(model, Decoding(beams=2), CPU)
    source, target = pairs()
    found = translator.translate(source[:60])
    assert sum(one == other for one, other in zip(found, target[:60], strict=True)) > 50


def test_lines_go_in_and_as_many_come_out_in_their_order(model, capsys, monkeypatch):
    given(monkeypatch, "\n".join(SOME).encode())
    main(["translate", "run", model])
    captured = capsys.readouterr()
    assert captured.out.split("\n") == [translated(line) if line.strip() else "" for line in SOME] + [""]
    assert captured.err == ""


def test_files_give_the_same_as_streams(model, lines, tmp_path, capsys):
    out = tmp_path / "out.txt"
    main(["translate", "run", model, "--input", lines(*SOME, end="\r\n"), "--output", str(out)])
    assert capsys.readouterr().out == ""
    assert out.read_text().splitlines() == [translated(line) if line.strip() else "" for line in SOME]


@pytest.mark.parametrize(
    ("window", "batch_tokens"),
    [
        *((2, 1), (7, 30)),
        *(
            pytest.param(window, batch_tokens, marks=pytest.mark.slow)
            for window in (1, 2, 7, 1000)
            for batch_tokens in (1, 30, 4096)
            if (window, batch_tokens) not in ((2, 1), (7, 30))
        ),
    ],
)
def test_neither_windows_nor_batches_change_the_translations(model, window, batch_tokens):
    translator = translating.load(model, Decoding(beams=2, batch_tokens=batch_tokens), CPU)
    source, target = pairs()
    told = []
    found = list(translator.stream([*SOME, *source[:10]], window, told.append))
    assert found == [translated(line) if line.strip() else "" for line in SOME] + target[:10]
    assert sum(told) == len(found)


@pytest.mark.parametrize("beams", [1, 3])
def test_every_line_gets_what_it_gets_alone(untrained, beams, monkeypatch):
    """Also where the model finds no end, and only the length of the source makes one."""
    monkeypatch.setattr(translating, "LONGER", 6)
    translator = translating.load(untrained, Decoding(beams=beams), CPU)
    lines = ["a", "the cat", "the dog is the dog"]
    together = translator.translate(lines)
    assert together == [translator.translate([line])[0] for line in lines]


def test_a_translation_ends_a_number_of_tokens_behind_its_source(untrained, monkeypatch):
    monkeypatch.setattr(translating, "LONGER", 3)
    translator = translating.load(untrained, Decoding(beams=2), CPU)
    written = []
    real = translator.model.generate
    monkeypatch.setattr(
        translator.model, "generate", lambda *given, **options: written.append(real(*given, **options)) or written[-1]
    )
    translator.translate(["the dog is the dog", "a"])
    lengths = (written[0] > 2).sum(1).tolist()
    sources = [len(ids) for ids in translator.tokenizer(["a", "the dog is the dog"])["input_ids"]]
    assert all(length <= source + 3 - 1 for length, source in zip(lengths, sources, strict=True))
    assert lengths == [source + 3 - 1 for source in sources]


def test_nothing_in_nothing_out(model, capsys, monkeypatch):
    given(monkeypatch, b"")
    main(["translate", "run", model])
    assert capsys.readouterr().out == ""


def test_lines_before_a_bad_one_are_translated_first(model, lines, capsys, monkeypatch):
    given(monkeypatch, b"where is the cat?\n\nwhere \xff is\nwhere is the dog?\n")
    with pytest.raises(SystemExit) as stop:
        main(["translate", "run", model])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out.splitlines() == [translated("where is the cat?"), ""]
    assert "--input: the standard input, line 3: not UTF-8 text (byte 7 of the line" in captured.err
    long = lines("where is the cat?", "where is the " * 40, "where is the dog?", "cat " * 99)
    with pytest.raises(SystemExit) as stop:
        main(["translate", "run", model, "--input", long])
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [translated("where is the cat?")]
    assert "line 2 has 1" in captured.err
    assert "tokens, but the model takes 60; use --truncate to truncate such lines" in captured.err


def test_a_pipe_is_read_once(model, tmp_path, monkeypatch):
    """Also where a terminal shows progress."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    pipe, out = tmp_path / "pipe", tmp_path / "out.txt"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("where is the cat?\n" * 3,))
    writer.start()
    main(["translate", "run", model, "--input", str(pipe), "--output", str(out)])
    writer.join()
    assert out.read_text().splitlines() == [translated("where is the cat?")] * 3


def test_what_comes_out_is_utf_8_wherever(model, monkeypatch):
    given(monkeypatch, b"where is the cat?\n")
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    main(["translate", "run", model])
    assert out.getvalue().decode() == translated("where is the cat?") + "\n"


def test_scoring_refuses_before_it_translates(untrained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(translating.Translator, "_translate", None)
    data = write(tmp_path, ["a", "where is the " * 40], ["x", "y"])
    assert "line 2 has" in fails(capsys, "translate", "score", untrained, *data)
    for option in ("--out", "--translations"):
        message = fails(capsys, "translate", "score", untrained, *data, option, str(tmp_path))
        assert f"{option}: expected a file or a new name, got a folder: '{tmp_path}'" in message


def test_long_lines_are_cut_or_taken_when_asked(model, untrained, lines, capsys):
    long = lines("where is the " * 40, "where is the cat?")
    main(["translate", "run", model, "--input", long, "--truncate"])
    assert capsys.readouterr().out.splitlines()[1:] == [translated("where is the cat?")]
    main(["translate", "run", model, "--input", long, "--max-length=500", "--beams=1"])
    assert len(capsys.readouterr().out.splitlines()) == 2
    message = fails(capsys, "translate", "run", untrained, "--input", long, "--max-length=500")
    assert (
        "--max-length: expected at most 60, the length that the model was trained with, got 500: learned covers"
        in message
    )


def test_truncation_keeps_the_beginning_and_the_end(model):
    translator = translating.load(model, Decoding(truncate=True, max_length=5), CPU)
    seen = []
    object.__setattr__(translator, "model", Recording(translator.model, seen))
    translator.translate(["the cat saw the dog near the old house."])
    ids = AutoTokenizer.from_pretrained(model)("the cat saw the dog near the old house.")["input_ids"]
    assert seen[0][0].tolist() == [*ids[:4], 2]


class Recording:
    """A model that keeps what it is given."""

    def __init__(self, model, seen):
        self.config, self.device, self.model, self.seen = model.config, model.device, model, seen

    def generate(self, sources, **options):
        self.seen.append(sources)
        return self.model.generate(sources, **options)


def test_what_reads_less_than_all_ends_the_command_without_a_word(model, capsys, monkeypatch):
    given(monkeypatch, b"where is the cat?\n")
    read, write = os.pipe()
    out = os.fdopen(write, "w")
    os.close(read)
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as stopped:
        main(["translate", "run", model])
    out.close()
    assert stopped.value.code == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("beams", [1, 3])
def test_scores_of_a_model(model, lines, tmp_path, capsys, beams):
    source, target = pairs()
    data = write(tmp_path, [*source[:20], ""], [*target[:20], "x"])
    files = {name: tmp_path / name for name in ("scores.json", "out.txt")}
    options = ["--out", str(files["scores.json"]), "--translations", str(files["out.txt"]), f"--beams={beams}"]
    main(["translate", "score", model, *data, *options])
    captured = capsys.readouterr()
    found = json.loads(files["scores.json"].read_text())
    assert found["bleu"] > 90
    assert found["lines"] == 21 == len(files["out.txt"].read_text().splitlines())
    assert found["beams"] == beams
    assert f"BLEU {found['bleu']:.2f} ({found['bleu_signature']})" in captured.out
    assert f"chrF {found['chrf']:.2f} ({found['chrf_signature']})" in captured.out
    # The same from files.
    given = ["--hypotheses", str(files["out.txt"]), "--references", data[3], "--source", data[1]]
    main(["translate", "score", *given, "--out", str(files["scores.json"])])
    again = json.loads(files["scores.json"].read_text())
    assert again["bleu"] == found["bleu"]
    assert again["bleu_by_words"] == found["bleu_by_words"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals("""
        score => MODEL: expected a model, or --hypotheses and --references, got none
        score --hypotheses a => --references: expected a file to go with --hypotheses, got none
        score --hypotheses a --references b --data c => --data: only with a model
        score m --hypotheses a => --hypotheses: either a model or files, got both
        score --hypotheses no --references no => --hypotheses: cannot read 'no'
        score --words 4,x => --words: expected numbers from 1 to 1048576 separated by commas, got 'x'
        score --words 9,4 => --words: expected ascending numbers
        score --words '4 8' => --words: expected numbers from 1 to 1048576 separated by commas, got '4 8'
        score --words 0,4 => --words: expected numbers from 1 to 1048576
        score --out no/such/file => --out: no such folder: 'no/such'
        score m => --data: expected tables, or --source and --target, got none
        run m --beams 0 => --beams: expected 1 to 1000, got 0
        run m --max-length 1 => --max-length: expected at least 2, got 1
        run m --input no => --input: cannot read 'no'
        run no/such/model => MODEL: cannot read no/such/model
    """),
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, expected, capsys, monkeypatch):
    given(monkeypatch, b"")
    assert expected in fails(capsys, "translate", *arguments)


def test_another_kind_of_model_is_refused(tmp_path, capsys, monkeypatch):
    given(monkeypatch, b"")
    other = Encoder(EncoderConfig(vocab_size=64, hidden_size=16, num_attention_heads=2, blocks="1"))
    with quiet_transformers():
        other.save_pretrained(tmp_path / "other")
    assert "MODEL: expected a model made by `whereformer translate train`, got a whereformer" in fails(
        capsys, "translate", "run", str(tmp_path / "other")
    )


def _replaced(name, content):
    def change(folder):
        (folder / name).write_bytes(content(folder / name))

    return change


def _other_tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{number}>" for number in range(9)])
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_replaced("model.safetensors", lambda file: file.read_bytes()[:400]), "MODEL: cannot read "),
        (_replaced("config.json", lambda file: file.read_bytes()[:40]), "MODEL: cannot read "),
        (_replaced("tokenizer.json", lambda file: file.read_bytes()[:40]), "MODEL: cannot read "),
        (
            _replaced(
                "config.json", lambda file: file.read_bytes().replace(b'"hidden_size": 32', b'"hidden_size": 16')
            ),
            "hidden_size 32 would fit, got 16",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (_other_tokenizer, "the tokenizer of"),
    ],
)
def test_a_broken_model_is_refused(model, tmp_path, capsys, monkeypatch, change, expected):
    given(monkeypatch, b"where is the cat?\n")
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    change(broken)
    message = fails(capsys, "translate", "run", str(broken))
    assert expected in message
    assert str(broken) in message


def test_code_of_a_model_is_never_run(tmp_path, capsys, monkeypatch):
    """transformers asks on the standard input, where a line may say yes."""
    (tmp_path / "config.json").write_text('{"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Theirs"}}')
    ran = tmp_path / "ran"
    (tmp_path / "theirs.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Theirs: pass\n")
    given(monkeypatch, b"y\n")
    assert f"MODEL: cannot read {tmp_path}" in fails(capsys, "translate", "run", str(tmp_path))
    assert not ran.exists()


def test_a_training_that_has_not_finished_says_so(tmp_path, capsys, monkeypatch):
    given(monkeypatch, b"")
    (tmp_path / "results.json").write_text("{}")
    assert f"MODEL: the training in {tmp_path} is not finished" in fails(capsys, "translate", "run", str(tmp_path))


def test_an_interrupt_says_what_is_there(model, lines, tmp_path, capsys, monkeypatch):
    file, out = lines("where is the cat?", "where is the dog?"), tmp_path / "out.txt"
    translate, done = translating.Translator._translate, []

    def interrupted(self, encoded, advance):
        if done:
            raise KeyboardInterrupt
        done.append(True)
        return translate(self, encoded, advance)

    monkeypatch.setattr(translating.Translator, "_translate", interrupted)
    monkeypatch.setattr(translating, "WINDOW", 1)
    told = []
    for command in (
        ["run", model, "--input", file, "--output", str(out)],
        ["score", model, "--source", file, "--target", file],
    ):
        with pytest.raises(SystemExit) as stop:
            main(["translate", *command])
        assert stop.value.code == 130
        told.append(capsys.readouterr().err.strip())
    assert told == [
        "whereformer: interrupted; 1 line has been written",
        "whereformer: interrupted; nothing has been written yet",
    ]
    assert out.read_text() == translated("where is the cat?") + "\n"


def test_output_and_input_are_different_files(model, lines, capsys):
    file = lines("where is the cat?")
    message = fails(capsys, "translate", "run", model, "--input", file, "--output", file)
    assert "--output: expected a different file from --input" in message
    assert Path(file).read_text() == "where is the cat?\n"


def test_the_input_under_another_name_is_not_the_output(model, lines, tmp_path, capsys, monkeypatch):
    file, other = lines("where is the cat?"), tmp_path / "other.txt"
    os.link(file, other)
    message = fails(capsys, "translate", "run", model, "--input", file, "--output", str(other))
    assert f"--output: expected a different file from --input, got '{other}'" in message
    with open(file, "rb") as stream:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        message = fails(capsys, "translate", "run", model, "--output", str(other))
    assert "--output: expected a different file from --input" in message
    assert Path(file).read_text() == "where is the cat?\n"
    for option in ("--out", "--translations"):
        message = fails(capsys, "translate", "score", model, "--source", file, "--target", file, option, str(other))
        assert f"{option}: expected a different file from --source, got '{other}'" in message


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_written(model, lines, tmp_path, capsys, kind):
    out = tmp_path / "out.txt"
    (tmp_path / "target").write_text("kept")
    {"link": lambda: out.symlink_to("target"), "pipe": lambda: os.mkfifo(out), "folder": out.mkdir}[kind]()
    found = {"link": "a symbolic link", "pipe": "a named pipe", "folder": "a folder"}[kind]
    file = lines("where is the cat?")
    score = ["score", "--hypotheses", file, "--references", file]
    commands = (["run", model, "--input", file], "--output"), (score, "--out"), (score, "--translations")
    for command, option in commands:
        message = fails(capsys, "translate", *command, option, str(out))
        assert f"{option}: expected a file or a new name, got {found}: '{out}'" in message
    assert (tmp_path / "target").read_text() == "kept"


def test_an_output_is_replaced_only_by_translations(model, lines, tmp_path, capsys):
    file, out = lines("a " * 100), tmp_path / "out.txt"
    out.write_text("old")
    assert "line 1 has" in fails(capsys, "translate", "run", model, "--input", file, "--output", str(out))
    assert out.read_text() == "old"
    file = lines("where is the cat?", "a " * 100)
    assert "line 2 has" in fails(capsys, "translate", "run", model, "--input", file, "--output", str(out))
    assert out.read_text() == translated("where is the cat?") + "\n"
    with largest_file(10):
        file = lines("where")
        message = fails(capsys, "translate", "run", model, "--input", file, "--output", str(out))
    assert f"cannot write {out}: the file is larger" in message
    assert out.read_text() == translated("where is the cat?") + "\n"
    assert not list(tmp_path.glob("*.partial"))


def test_the_folder_of_a_training_is_as_good_as_its_model(model):
    assert translating.load(str(Path(model).parent), Decoding(), CPU).limit == 60


def test_multi30k(tmp_path, capsys):
    """A step on real text, where that is: WHEREFORMER_MULTI30K is a folder with its Parquet files."""
    folder = os.environ.get("WHEREFORMER_MULTI30K")
    if folder is None:
        pytest.skip("WHEREFORMER_MULTI30K names no folder with Multi30k")
    data = ["--data", f"{folder}/train.parquet", "--columns=en,de", "--validation", f"{folder}/validation.parquet"]
    train(data, tmp_path, "--vocab-size=8000", "--steps=2", "--max-length=128", "--batch-tokens=1024")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["text"]["training"]["pairs"] == 29000
    assert results["text"]["training"]["empty"] == results["text"]["training"]["too_long"] == 0
    main(["translate", "run", str(tmp_path / "model"), "--input", _lines_of(folder, tmp_path), "--beams=1"])


def _lines_of(folder, tmp_path):
    from pyarrow import parquet

    file = tmp_path / "test.en"
    file.write_text(
        "".join(f"{line}\n" for line in parquet.read_table(f"{folder}/test_2016_flickr.parquet")["en"][:3].to_pylist())
    )
    return str(file)
