"""A tiny model with its tokenizer, and tables of labeled text, as fine-tuning takes them."""

import random

import pyarrow as pa
import torch
from pyarrow import parquet

from whereformer import EncoderConfig, EncoderForMaskedLM
from whereformer.data.glue import GLUE
from whereformer.data.tokenizers import fit_tokenizer
from whereformer.lab.loading import quiet_transformers

NOUNS = ["cat", "dog", "bird", "fish", "child", "baker", "king", "queen", "farmer", "horse"]
VERBS = ["saw", "met", "heard", "liked"]


def sentence(chance):
    words = [chance.choice(NOUNS), chance.choice(VERBS), "the", chance.choice(NOUNS)]
    return " ".join(["the", *words, *["again"] * chance.randrange(4)])


def save_model(folder, *, max_length=40, **changes):
    """A checkpoint with learned positions, and its tokenizer."""
    tokenizer = fit_tokenizer([sentence(random.Random(seed)) for seed in range(300)], 120)
    torch.manual_seed(0)
    config = {"hidden_size": 16, "num_attention_heads": 2, "blocks": "2", "intermediate_size": 32, **changes}
    size = max(tokenizer.get_vocab().values()) + 1
    model = EncoderForMaskedLM(EncoderConfig(vocab_size=size, max_position_embeddings=max_length, **config))
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def columns(task, count, seed=0):
    """Rows of a GLUE task: those whose first word is in the first half of the nouns have another label."""
    chance = random.Random(seed)
    texts = [[sentence(chance) for _ in task.texts] for _ in range(count)]
    values = [NOUNS.index(row[0].split()[1]) for row in texts]
    labels = [value / 2 for value in values] if task.classes is None else [v % len(task.classes) for v in values]
    return {**{name: [row[index] for row in texts] for index, name in enumerate(task.texts)}, task.label: labels}


def save_glue(folder, *names, rows=24, subsets=()):
    """GLUE's tasks as Parquet; the splits in ``subsets`` are parts."""
    for name in names:
        (folder / name).mkdir(parents=True)
        for seed, split in enumerate(("train", *(split for split, _ in GLUE[name].eval_splits))):
            suffix = "_subset" if split in subsets else ""
            table = pa.table(columns(GLUE[name], rows, seed))
            parquet.write_table(table, folder / name / f"{split}{suffix}.parquet")
    return folder
