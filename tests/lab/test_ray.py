"""Jobs on a Ray cluster: the same records as in processes, also if a machine is lost."""

import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.failing import fails
from tests.lab.toy import Toy
from tests.recipes.trainings import TINY_ENCODER
from whereformer.cli.main import main
from whereformer.errors import InputError
from whereformer.lab.run import read_records

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")


def words(text, out, *flags):
    """The command that compares two methods at a tiny size."""
    command = ["compare", "--data", text, "--out", str(out), "--positions=none,tisa", "--rate-factors=1"]
    return [*command, *TINY_ENCODER, *flags]


def compare(*arguments):
    """Compare two methods, and return the values of all records without times."""
    main(words(*arguments))
    records = read_records(arguments[1] / "records.jsonl")[1].items()
    return {
        name: {key: part for key, part in record["value"].items() if "seconds" not in key} for name, record in records
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text("".join(f"one {word} follows another {word}.\n" for word in ("sheep", "goat", "cow") * 400))
    return str(path)


@needs_ray
@pytest.mark.slow
def test_a_cluster_makes_the_records_of_processes(text, tmp_path, monkeypatch, capsys):
    expected = compare(text, tmp_path / "here", "--jobs=1")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert compare(text, Path("seen"), "--ray=local") == expected
    assert "tisa, seed 0: held-out loss" in capsys.readouterr().out
    monkeypatch.setattr(Path, "touch", lambda path: None)  # as if no machine saw the folder
    with pytest.raises(SystemExit, match=r"^2$"):
        main(words(text, "unseen", "--ray=local"))
    assert "use storage that all machines share" in capsys.readouterr().err
    assert (tmp_path / "seen" / "models" / "tisa-0" / "model.safetensors").exists()
    assert not [path for path in (tmp_path / "seen").iterdir() if path.name.startswith(".ray")]


@needs_ray
@pytest.mark.slow
def test_the_job_of_a_lost_machine_is_done_again(tmp_path):
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]

    def lose_a_machine():
        records = tmp_path / "records.jsonl"
        while not records.exists() or len(records.read_text().splitlines()) < 2:
            time.sleep(0.1)
        time.sleep(1)  # now both machines have a job that waits
        cluster.remove_node(nodes[0])
        (tmp_path / "go").touch()

    thread = threading.Thread(target=lose_a_machine)
    ray.init(cluster.address)
    try:
        thread.start()
        report = Toy(out=tmp_path, seeds=4, fails="wait for go", ray="auto").start(quiet=True)
        assert [draw.number for draw in report.values.values()] == [
            draw.number for draw in Toy(out=tmp_path / "here", seeds=4, jobs=1).start(quiet=True).values.values()
        ]
        with pytest.raises(InputError, match="ray: a machine was lost 4 times"):
            Toy(out=tmp_path / "lost", fails="kill", ray="auto").start(quiet=True)
    finally:
        thread.join()
        ray.shutdown()
        cluster.shutdown()


@needs_ray
def test_without_a_cluster_one_line_says_so_before_any_work(tmp_path, capsys):
    refused = fails(capsys, "compare", "--out", str(tmp_path / "out"), "--ray", "127.0.0.1:1")
    assert "--ray: cannot reach a cluster at 127.0.0.1:1: " in refused
    assert not (tmp_path / "out").exists()


@needs_ray
@pytest.mark.slow
def test_jobs_find_a_recipe_outside_the_current_folder(tmp_path):
    main(["run", str(Path(__file__).with_name("toy.py")), "--ray=local", "--seeds=1", "--out", str(tmp_path)])
    assert [*read_records(tmp_path / "records.jsonl")[1]] == ['["draw", 0]']
