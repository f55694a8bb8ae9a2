"""What a training saves works elsewhere: the Hub, pipelines, sentence-transformers, export."""

import os
import subprocess
import sys

import pytest
import torch
import transformers

from tests.recipes.trainings import TINY_ENCODER
from whereformer import Encoder, EncoderConfig, EncoderForMaskedLM
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


def fresh(code):
    """What a fresh process prints, which cannot reach the Hub."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


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


def test_sentence_transformers_takes_the_folder_trains_saves_and_loads_again(folder, tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    body = Transformer(folder)
    built = library.SentenceTransformer(modules=[body, Pooling(body.get_embedding_dimension(), "mean")], device="cpu")
    texts = ["the cat saw the dog", "where is the horse? " * 9]
    embeddings = built.encode(texts)
    assert embeddings.shape == (2, 16)
    # By hand: the mean over the last states.
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(texts[0], return_tensors="pt")
    with torch.no_grad():
        mean = Encoder.from_pretrained(folder).eval()(**tokens).last_hidden_state.mean(1)
    torch.testing.assert_close(torch.from_numpy(embeddings[:1]), mean, rtol=0, atol=1e-5)
    model = library.SentenceTransformer(folder, device="cpu")
    assert model.encode(texts) == pytest.approx(embeddings, abs=1e-6)
    assert model.max_seq_length == 16
    pairs = Dataset.from_dict({"anchor": ["the cat", "a dog"], "positive": ["cat", "where is the dog?"]})
    arguments = library.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=1, report_to=[], save_strategy="no", use_cpu=True
    )
    loss = MultipleNegativesRankingLoss(model)
    library.SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss).train()
    trained = model.encode(texts)
    assert abs(trained - embeddings).max() > 1e-6
    model.save(str(tmp_path / "saved"))
    assert library.SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(texts) == pytest.approx(trained)
