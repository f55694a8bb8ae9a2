"""What a training saves works elsewhere: in pipelines, and as a tokenizer."""

import pytest
import torch
import transformers

from tests.recipes.trainings import TINY_ENCODER
from whereformer import EncoderConfig, EncoderForMaskedLM
from whereformer.cli.main import main

WORDS = [*TINY_ENCODER, "--every=6", "--learning-rate=0.01", "--position=learned+tisa", "--device=cpu"]


@pytest.fixture(scope="module")
def out(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("left")
    main(["pretrain", "--data", text, "--out", str(out), *WORDS])
    return out


@pytest.fixture(scope="module")
def folder(out):
    return str(out / "model")


def test_fill_mask(folder):
    fill = transformers.pipeline("fill-mask", model=folder, top_k=3)
    mask = fill.tokenizer.mask_token
    tokens = [each["token_str"] for each in fill(f"the {mask} saw the dog")]
    ids = fill.tokenizer(f"the {mask} saw the dog", return_tensors="pt")
    with torch.no_grad():
        logits = EncoderForMaskedLM.from_pretrained(folder)(**ids).logits
    best = logits[0, (ids["input_ids"][0] == fill.tokenizer.mask_token_id).nonzero()[0, 0]].topk(3).indices
    assert [fill.tokenizer.convert_tokens_to_ids(token) for token in tokens] == best.tolist()


def test_the_saved_tokenizer_truncates_to_the_models_length(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == EncoderConfig.from_pretrained(folder).max_position_embeddings == 16
    assert len(tokenizer("the cat " * 30, truncation=True)["input_ids"]) == 16
