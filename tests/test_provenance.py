import json
import shutil
import subprocess

import pytest
import torch

from whereformer import provenance


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of one commit that holds the module, as far as the module can tell."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    source = tmp_path / "package" / "module.py"
    source.parent.mkdir()
    source.write_text("first")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", str(source))
    git(tmp_path, *("-c", "user.name=A", "-c", "user.email=a@b.c"), *("commit", "--quiet", "--message=first"))
    monkeypatch.setattr(provenance, "__file__", str(source))
    provenance.commit.cache_clear()
    yield source
    provenance.commit.cache_clear()


def git(folder, *arguments):
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_of_a_checkout_whatever_its_tags_and_whether_it_was_changed(checkout):
    commit = git(checkout.parent, "rev-parse", "HEAD")
    git(checkout.parent, "tag", "v1")
    assert provenance.commit() == commit
    provenance.commit.cache_clear()
    checkout.write_text("second")
    assert provenance.commit() == f"{commit}-dirty"


def test_results_say_where_they_come_from(tmp_path):
    write_results = pytest.importorskip("benchmarks.result_files", reason="tested without benchmarks").write_results
    path = tmp_path / "folder" / "results.json"
    write_results(path, {"rows": [1]})
    results = json.loads(path.read_text())
    assert list(results) == ["date", "commit", "machine", "versions", "rows"]
    assert results["rows"] == [1]
    assert results["machine"]["cpu"]
    assert results["versions"]["torch"] == torch.__version__
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_results(path, {"rows": [float("nan")]})
