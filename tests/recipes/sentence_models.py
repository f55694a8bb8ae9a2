"""Tiny sentence encoders, saved as sentence-transformers does, and documents for them."""

import json
import random

import torch
from transformers import BertConfig, BertModel

from whereformer.data.tokenizers import fit_tokenizer
from whereformer.lab.loading import quiet_transformers

NOUNS = ("cat", "dog", "bird", "fish", "child", "baker", "king", "queen", "farmer", "horse")
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
WORDS = "\n".join(
    f"the {one} saw the {thing} near the old house. a {thing} and a {one} went to the market. where is the {one}?"
    for one in NOUNS
    for thing in NOUNS
)
MODULES = ("Transformer", "Pooling", "Normalize")


def save(folder, model, words, limit=16, modules=MODULES, pooling="mean_tokens"):
    """Save a model as sentence-transformers does."""
    tokenizer = fit_tokenizer([words], 64)
    tokenizer.model_max_length = limit
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    described = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(described))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 16, f"pooling_mode_{pooling}": True})
    )
    return str(folder)


def bert(positions=32, **changes):
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES | changes, max_position_embeddings=positions, initializer_range=0.3))


def save_documents(file, words):
    """Save forty documents of words in an order of their own."""
    draw, known = random.Random(0), words.split()[:400]
    rows = [json.dumps({"text": " ".join(draw.choices(known, k=80))}) for _ in range(40)]
    file.write_text("\n".join(rows))
    return str(file)
