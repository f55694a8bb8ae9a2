"""Pipes, devices and sockets in place of files: one line, for every command that would read them."""

import os
import shutil
from pathlib import Path

import pytest

from tests.failing import fails
from whereformer import EncoderConfig, EncoderForMaskedLM
from whereformer.data.tokenizers import fit_tokenizer
from whereformer.errors import InputError
from whereformer.files import check_regular, check_regular_in

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe.txt"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = EncoderConfig(
        vocab_size=64, hidden_size=16, num_attention_heads=2, intermediate_size=16, blocks="1", position="learned"
    )
    EncoderForMaskedLM(config).save_pretrained(folder)
    fit_tokenizer(["some text to learn from"], 64).save_pretrained(folder)
    return folder


def test_what_is_no_regular_file_is_named(tmp_path, pipe):
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, Path("/dev/null"), tmp_path / "link"):
        with pytest.raises(InputError, match=r"^data: expected a file, got a pipe, socket or device: "):
            check_regular("data", path)
    with pytest.raises(InputError, match="model: expected a file, got"):
        check_regular_in("model", tmp_path)
    with pytest.raises(InputError, match="no such file: "):
        check_regular(None, tmp_path / "none")
    with pytest.raises(InputError, match=r"cannot read .*: File name too long"):
        check_regular(None, tmp_path.parent / ("n" * 300))
    check_regular_in(None, "bert-base-uncased")


@pytest.mark.parametrize(
    "command",
    [
        "compare --data {}",
        "pretrain --data {}",
        "translate train --data {} other.txt",
        "finetune --model {model} --train {} --validation {} --text text --label label",
        "compare --plugin {}",
    ],
)
def test_a_pipe_is_not_read(command, pipe, model, tmp_path, capsys):
    table = pipe.rename(pipe.with_suffix(".jsonl")) if "--train" in command else pipe
    words = [word.format(table, model=model) for word in command.split()]
    line = fails(capsys, *words, "--out", str(tmp_path / "out"))
    assert "expected a file, got a pipe, socket or device" in line
    assert line.split(": ")[1].removeprefix("--") in command


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("analyze {}", name) for name in ("config.json", "model.safetensors")),
        *(
            ("finetune --model {} --task rte --data {}", name)
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
        ),
    ],
)
def test_a_pipe_in_a_model_is_not_read(name, command, model, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / name).unlink()
    os.mkfifo(copy / name)
    words = [word.format(copy) for word in command.split()]
    assert "got a pipe" in fails(capsys, *words, "--out", str(tmp_path / "out"))


@pytest.mark.parametrize("command", ["compare", "probe", "pretrain"])
def test_results_that_are_a_pipe_are_not_read(command, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    os.mkfifo(out / "records.jsonl")
    assert "expected a file, got a pipe" in fails(capsys, command, "--out", str(out))
