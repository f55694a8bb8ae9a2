"""What ``attach`` makes of every model of transformers: the data of the page is complete, and still true."""

import json
import subprocess
import sys

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.test_docs import extension

sweep = extension("sweep")


def outcomes():
    """The outcome of every configuration class on the page, as pairs."""
    return [(row["config"], row["outcome"]) for row in json.loads(sweep.DATA.read_text(encoding="utf-8"))["outcomes"]]


def of_this_version():
    if sweep.measured_with() != transformers.__version__:
        pytest.skip(f"the page is of transformers {sweep.measured_with()}")


def test_every_model_type_is_on_the_page_once():
    of_this_version()
    names = [name for name, _ in outcomes()]
    assert len(names) == len(set(names))
    # Those of a package of its own stand there under the names that it gives them.
    assert {*CONFIG_MAPPING_NAMES.values()} <= {*names}


@pytest.mark.slow
def test_every_configuration_class_is_on_the_page():
    of_this_version()
    names = {name for package in sweep.packages() for name in sweep.config_classes(package)}
    assert names == {name for name, _ in outcomes()}


@pytest.mark.slow
def test_no_model_is_silently_wrong(tmp_path):
    """The whole sweep, in a process of its own: an hour of one processor. Each model class has two minutes."""
    subprocess.run([sys.executable, sweep.__file__, "--out", str(tmp_path)], check=True)
    results = sweep.results(tmp_path)
    rows = [row for rows in results.values() for row in rows]
    assert not [row for row in rows if row["outcome"] in ("crashed", "wrong", "not verified")]
    assert not [row for row in rows if row["outcome"] == "right" and not row["caught"]]
    if sweep.measured_with() != transformers.__version__:
        return
    assert [(row["config"], row["outcome"]) for row in sweep.outcomes(results)] == outcomes()
