"""Results name the machine, the versions and the commit they come from."""

import subprocess

import pytest
import torch

import whereformer
from whereformer.runs import machine


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit, in which the package seems to lie."""
    package = tmp_path / "src" / "whereformer"
    (package / "runs").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(machine, "__file__", str(package / "runs" / "machine.py"))

    def git(*arguments):
        identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
        done = subprocess.run(
            ["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    machine.commit.cache_clear()
    yield git, package
    machine.commit.cache_clear()


def test_the_machine_names_processor_versions_and_commit():
    found = machine.machine(torch.device("cpu"))
    assert list(found) == ["cpu", "threads", "python", "torch", "whereformer", "commit", "system"]
    assert found["whereformer"] == whereformer.__version__
    assert found["torch"] == torch.__version__


def test_the_commit_says_whether_tracked_files_changed(checkout):
    git, package = checkout
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    (package / "untracked.py").write_text("")
    assert machine.commit() == git("rev-parse", "HEAD")[:12]
    machine.commit.cache_clear()
    (package / "__init__.py").write_text("changed = True\n")
    assert machine.commit() == git("rev-parse", "HEAD")[:12] + "+changes"


def test_a_package_that_its_surrounding_checkout_does_not_track_has_no_commit(checkout):
    git, _ = checkout
    git("commit", "--quiet", "--allow-empty", "--message", "of another project")
    assert machine.commit() is None


def test_there_is_no_commit_without_git(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine.commit() is None
