"""Records with a true checksum whose lists are too short, or whose scores lack some: done again, for every recipe."""

import json
from copy import deepcopy

import pytest

from tests.failing import fails
from tests.recipes.finetuning import save_glue, save_model
from tests.recipes.parallel_text import TINY as TINY_TRANSLATION
from tests.recipes.parallel_text import pairs, write
from tests.recipes.sentence_models import WORDS, bert, save, save_documents
from tests.recipes.trainings import TINY_ENCODER
from whereformer.cli.main import main
from whereformer.manifest import dump_with_hash


@pytest.fixture(scope="module")
def commands(text, tmp_path_factory):
    """The words of a quick command of each recipe that records lists."""
    folder = tmp_path_factory.mktemp("data")
    model = save_model(folder / "model")
    glue = save_glue(folder / "glue", "cola")
    encoder = save(folder / "bert", bert(), WORDS)
    documents = save_documents(folder / "documents.jsonl", WORDS)
    lines = write(folder, *pairs())
    few = ["--seeds=1", "--epochs=1", "--kernels=0,2", "--device=cpu", "--jobs=1"]
    return {
        "compare": ["--data", text, "--positions=none,tisa", "--rate-factors=1,2", "--jobs=1", *TINY_ENCODER],
        "probe": ["--positions=none", "--tasks=copy", "--steps=2", "--length=4", "--jobs=1"],
        "pretrain": ["--data", text, "--report-to=none", *TINY_ENCODER],
        "finetune": ["--model", model, "--data", str(glue), "--task=cola", *few],
        "translate train": [*lines, "--report-to=none", *TINY_TRANSLATION],
        "extend": [str(encoder), "--data", str(documents), "--length=48", "--steps=4"],
    }


FORGED = {
    "compare": ["losses", "scores", "windows"],
    "probe": ["scores"],
    "pretrain": ["losses", "scores", "saved"],
    "finetune": ["losses", "scores"],
    "translate train": ["losses", "scores", "saved"],
    "extend": ["losses", "curve"],
}


@pytest.mark.parametrize("command", FORGED)
def test_values_that_lack_a_part_are_done_again(command, commands, tmp_path, capsys):
    words = [*command.split(), *commands[command], "--out", str(tmp_path)]
    main(words)
    path = tmp_path / "records.jsonl"
    first, *records = [json.loads(line) for line in path.read_text().splitlines()]
    capsys.readouterr()
    forgeries = [
        (number, name) for number, record in enumerate(records) for name in FORGED[command] if name in record["value"]
    ]
    tested = set()
    for number, name in forgeries:
        if name in tested:
            continue
        tested.add(name)
        forged = deepcopy(records)
        value = forged[number]["value"]
        # One less may be as good for a curve that nobody counts; none never is.
        value[name] = type(value[name])() if command != "compare" else value[name][:-1]
        lines = [first, *forged]
        path.write_text(
            "".join(dump_with_hash({key: part for key, part in line.items() if key != "check"}) for line in lines)
        )
        main(words)
        output = " ".join(capsys.readouterr().out.split())
        assert "repeating" in output, name
        assert "its record lacks" in output, name
        again = [json.loads(line)["value"] for line in path.read_text().splitlines()[1:]]
        assert again == [record["value"] for record in records], name
    assert tested == set(FORGED[command])


def test_a_forged_comparison_is_not_merged(commands, tmp_path, capsys):
    main(["compare", *commands["compare"], "--out", str(tmp_path)])
    path = tmp_path / "records.jsonl"
    first, *records = [json.loads(line) for line in path.read_text().splitlines()]
    first["options"] |= {"out": "elsewhere"}
    for forgery in ({"rate": "x"}, {"losses": 7}, {"failed": []}, "a short key"):
        forged = deepcopy(records)
        for record in forged:
            if '"train"' in record["key"] and forgery == "a short key":
                record["key"] = '["train", 0]'
            elif '"train"' in record["key"]:
                record["value"] |= forgery
        lines = [{key: part for key, part in line.items() if key != "check"} for line in (first, *forged)]
        path.write_text("".join(map(dump_with_hash, lines)))
        capsys.readouterr()
        line = fails(capsys, "merge", str(tmp_path), str(tmp_path / "second"), "--out", str(tmp_path / "new"))
        assert line.startswith(f"whereformer: FOLDERS: {path} has a value of another type for ["), forgery
        assert line.endswith("run the same whereformer compare again")
