"""What ``attach`` makes of every model of transformers: the page that lists it is complete, and still true."""

import re
import subprocess
import sys

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.test_docs import extension

sweep = extension("sweep")


def sections():
    """The page's configuration classes, by the section that they stand in."""
    parts = re.split(r"^## ", sweep.PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.split("\n", 1)[0]: re.findall(r"^(?:\| )?`(\w+)`", part, flags=re.MULTILINE) for part in parts}


def of_this_version():
    if sweep.measured_with() != transformers.__version__:
        pytest.skip(f"the page is of transformers {sweep.measured_with()}")


def test_every_model_type_is_on_the_page_once():
    of_this_version()
    named = [name for names in sections().values() for name in names]
    assert len(named) == len(set(named))
    # Those of a package of its own stand there under the names that it gives them.
    assert {*CONFIG_MAPPING_NAMES.values()} <= {*named}


@pytest.mark.slow
def test_every_configuration_class_is_on_the_page():
    of_this_version()
    named = {name for names in sections().values() for name in names}
    assert {name for package in sweep.packages() for name in sweep.config_classes(package)} == named


@pytest.mark.slow
def test_no_model_is_silently_wrong(tmp_path):
    """The whole sweep, in a process of its own: half an hour of one processor. Each model class has half a minute."""
    subprocess.run([sys.executable, sweep.__file__, "--out", str(tmp_path)], check=True)
    found = sweep.results(tmp_path)
    rows = [row for rows in found.values() for row in rows]
    assert not [row for row in rows if row["outcome"] in ("crashed", "wrong", "not proven")]
    assert not [row for row in rows if row["outcome"] == "right" and not row["caught"]]
    if sweep.measured_with() != transformers.__version__:
        return
    kinds = {"right": "Served", "refused": "Refused", "not built": "Not tried"}
    assert {config: kinds[sweep.outcome(rows)] for config, rows in found.items()} == {
        config: section for section, names in sections().items() for config in names if section in kinds.values()
    }
