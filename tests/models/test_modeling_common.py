"""Hugging Face's common tests of models run on ours: `make test-transformers SOURCE=...`.

They are in the source distribution of transformers, without two modules that they import and that need not do anything.
"""

import os
import sys
import unittest
import warnings
from importlib import import_module
from types import ModuleType
from unittest.mock import patch

import pytest
import torch

from whereformer import (
    Encoder,
    EncoderConfig,
    EncoderForCausalLM,
    EncoderForMaskedLM,
    EncoderForQuestionAnswering,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
)

FOLDER = os.environ.get("WHEREFORMER_TRANSFORMERS_TESTS")
if not FOLDER:
    pytest.skip("WHEREFORMER_TRANSFORMERS_TESTS names no folder with transformers' tests", allow_module_level=True)
pytest.importorskip("parameterized", reason="parameterized, which they need, is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PACKAGE = "tests_of_transformers"
CLASSES = {
    "MODEL_MAPPING_NAMES": Encoder,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": EncoderForMaskedLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": EncoderForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": EncoderForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": EncoderForQuestionAnswering,
}
"""Which labels a class takes is known by these lists of names."""


def add_module(name, **content):
    sys.modules[f"{PACKAGE}{name}"] = module = ModuleType(f"{PACKAGE}{name}")
    vars(module).update(content)


add_module("", __path__=[FOLDER])
add_module(".exporters", __path__=[])
add_module(".exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
add_module(".generation", __path__=[])
add_module(".generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
with warnings.catch_warnings(action="ignore"):  # their marks are not known here
    common = import_module(f"{PACKAGE}.test_modeling_common")


class ModelTester:
    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 16, 2, 2

    def __init__(self, position, causal):
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "blocks": "2"}
        options = {"causal": causal, "classifier_pooling": "mean" if causal else "cls"}
        self.config = EncoderConfig(vocab_size=99, max_position_embeddings=64, position=position, **sizes, **options)

    def prepare_config_and_inputs_for_common(self):
        ids = common.ids_tensor([self.batch_size, self.seq_length], 99)
        return self.config, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class TestTisa(common.ModelTesterMixin, unittest.TestCase):
    position, causal = "tisa", False
    all_model_classes = tuple(CLASSES.values())

    def setUp(self):
        self.model_tester = ModelTester(self.position, self.causal)
        for names, kind in CLASSES.items():
            known = patch.dict(getattr(common, names), whereformer=kind.__name__)
            known.start()
            self.addCleanup(known.stop)


class TestLearned(TestTisa):
    position = "learned"


class TestCausal(TestTisa):
    position, causal = "rope", True
    all_model_classes = (EncoderForCausalLM, EncoderForSequenceClassification)

    def test_causal_lm_loss_honors_shift_labels(self):
        """The one test that is not theirs: these labels are refused."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        with pytest.raises(TypeError, match=r"^shift_labels: no argument of EncoderForCausalLM"):
            EncoderForCausalLM(config)(**inputs, shift_labels=inputs["input_ids"])
