"""Translating: as many lines out as in, in their order, whatever their lengths; and how good they are."""

import io
import json
import os
import shutil
import sys

import pytest
import sacrebleu
import torch
from transformers import AutoTokenizer

from tests.failing import fails, refusals
from tests.recipes.parallel_text import pairs, train, translated, write
from whereformer import Encoder, EncoderConfig
from whereformer.cli.main import main
from whereformer.lab import translation as translating
from whereformer.lab.loading import quiet_transformers

LEARNED = ["--hidden-size=32", "--intermediate-size=64", "--num-heads=4", "--steps=350", "--every=350"]
LEARNED += ["--batch-tokens=384", "--learning-rate=0.01", "--warmup=60", "--dropout=0", "--average=1"]
LEARNED += ["--position=shaw", "--schedule=linear"]
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


def set_stdin(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


SOME = ["where is the cat?", "", "the king saw the queen near the old house.", "   ", "where is the dog?"]


@pytest.mark.parametrize("beams", [1, 2])
def test_it_has_learned_to_translate(model, beams):
    source, target = pairs()
    translations = translating.translate_lines(*translating.load(model, CPU), source[:60], beams=beams)
    assert sum(translation == reference for translation, reference in zip(translations, target[:60], strict=True)) > 50


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_go_in_and_as_many_come_out_in_their_order(model, capsys, monkeypatch, end):
    set_stdin(monkeypatch, end.join(SOME).encode())
    main(["translate", "run", model])
    captured = capsys.readouterr()
    assert captured.out.split("\n") == [translated(line) if line.strip() else "" for line in SOME] + [""]
    assert captured.err == ""


def test_batches_and_windows_do_not_change_the_translations(model, capsys, monkeypatch):
    source, target = pairs()
    loaded = translating.load(model, CPU)
    monkeypatch.setattr(translating, "BATCH_TOKENS", {"cpu": 30})
    expected = [translated(line) if line.strip() else "" for line in SOME] + target[1:11]
    assert translating.translate_lines(*loaded, [*SOME, *source[1:11]]) == expected
    monkeypatch.setattr("whereformer.cli.translate.WINDOW", 2)
    set_stdin(monkeypatch, "\n".join([*SOME, *source[1:11]]).encode())
    main(["translate", "run", model])
    assert capsys.readouterr().out.splitlines() == expected


def test_a_translation_ends_a_number_of_tokens_behind_its_source(untrained, monkeypatch):
    monkeypatch.setattr(translating, "MAX_EXTRA_TOKENS", 3)
    model, tokenizer = translating.load(untrained, CPU)
    written = []
    real = model.generate
    monkeypatch.setattr(model, "generate", lambda **options: written.append(real(**options)) or written[-1])
    translating.translate_lines(model, tokenizer, ["the dog is the dog"], beams=2)
    source = len(tokenizer("the dog is the dog")["input_ids"])
    assert written[0].shape[1] == 1 + source + 3


@pytest.mark.parametrize(
    ("entry", "value", "problem"), [("pad_token", None, "does not match the model"), ("model_input_names", ["x"], None)]
)
def test_a_tokenizer_that_does_not_pad_is_refused(entry, value, problem, untrained, tmp_path, capsys, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(untrained, copy)
    file = copy / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), entry: value}))
    set_stdin(monkeypatch, b"where is the cat?\n")
    if problem is None:
        main(["translate", "run", str(copy)])
    else:
        assert problem in fails(capsys, "translate", "run", str(copy))


def test_what_is_not_utf_8_is_told_by_its_line(model, capsys, monkeypatch):
    set_stdin(monkeypatch, b"where is the cat?\n\nwhere \xff is\nwhere is the dog?\n")
    assert "the standard input, line 3: not UTF-8 text (" in fails(capsys, "translate", "run", model)


def test_what_comes_out_is_utf_8_wherever(model, monkeypatch):
    set_stdin(monkeypatch, b"where is the cat?\n")
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    main(["translate", "run", model])
    assert out.getvalue().decode() == translated("where is the cat?") + "\n"


def test_long_lines_are_translated_where_the_method_can(model, untrained, capsys, monkeypatch):
    long = ("where is the " * 40).encode()
    set_stdin(monkeypatch, long + b"\nwhere is the cat?\n")
    main(["translate", "run", model, "--beams=1"])
    assert capsys.readouterr().out.splitlines()[1:] == [translated("where is the cat?")]
    set_stdin(monkeypatch, b"where is the cat?\n" + long)
    message = fails(capsys, "translate", "run", untrained)
    assert "the line 'where is the where is the" in message
    assert "is too long: learned covers" in message


def test_what_reads_less_than_all_ends_the_command_without_a_word(model, capsys, monkeypatch):
    set_stdin(monkeypatch, b"where is the cat?\n")
    read, write = os.pipe()
    out = os.fdopen(write, "w")
    os.close(read)
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as stopped:
        main(["translate", "run", model])
    out.close()
    assert stopped.value.code == 141
    assert capsys.readouterr().err == ""


def test_with_references_it_tells_sacrebleus_scores(model, tmp_path, capsys, monkeypatch):
    source, target = pairs()
    file = tmp_path / "references.txt"
    references = [*target[:20], "x"]
    file.write_text("\n".join(references))
    set_stdin(monkeypatch, "\n".join([*source[:20], "", ""]).encode())
    main(["translate", "run", model, "--references", str(file)])
    captured = capsys.readouterr()
    hypotheses = captured.out.splitlines()
    bleu, chrf = (metric(hypotheses, [references]) for metric in (sacrebleu.corpus_bleu, sacrebleu.corpus_chrf))
    assert bleu.score > 90
    lines = captured.err.splitlines()
    assert lines[0].startswith(f"BLEU {bleu.score:.2f} (nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.")
    assert lines[1].startswith(f"chrF {chrf.score:.2f} (nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.")
    set_stdin(monkeypatch, "\n".join(source[:19]).encode())
    with pytest.raises(SystemExit) as stop:
        main(["translate", "run", model, "--references", str(file)])
    assert stop.value.code == 2
    assert "--references: expected 19 lines as the input has, got 21" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals("""
        run m --beams 0 => --beams: expected 1 to 1000, got 0
        run m --length-penalty 11 => --length-penalty: expected -10 to 10, got 11
        run m --references no => --references: no such file: 'no'
        run no/such/model => MODEL: cannot read no/such/model
    """),
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, expected, capsys, monkeypatch):
    set_stdin(monkeypatch, b"")
    assert expected in fails(capsys, "translate", *arguments)


def test_another_kind_of_model_is_refused(tmp_path, capsys, monkeypatch):
    set_stdin(monkeypatch, b"")
    encoder = Encoder(EncoderConfig(vocab_size=64, hidden_size=16, num_attention_heads=2, blocks="1"))
    with quiet_transformers():
        encoder.save_pretrained(tmp_path / "other")
    assert "expected a model of `whereformer translate train`, got whereformer" in fails(
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
            "), got (",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "MODEL: cannot read "),
        (_other_tokenizer, "the tokenizer of"),
    ],
)
def test_a_broken_model_is_refused(model, tmp_path, capsys, monkeypatch, change, expected):
    set_stdin(monkeypatch, b"where is the cat?\n")
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
    set_stdin(monkeypatch, b"y\n")
    assert f"MODEL: cannot read {tmp_path}" in fails(capsys, "translate", "run", str(tmp_path))
    assert not ran.exists()


def test_the_folder_of_a_training_says_where_its_model_is(model, capsys, monkeypatch):
    set_stdin(monkeypatch, b"")
    assert f"did you mean '{model}'?" in fails(capsys, "translate", "run", model.removesuffix("/model"))
