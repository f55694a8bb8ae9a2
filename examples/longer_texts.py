"""A sentence encoder that reads 32 tokens, extended to 128.

The encoder is a small BERT with random weights, and the text is the documentation inside Python. So the example needs
no download, and its vectors mean nothing; with a trained model, the steps are the same.
"""

import json
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

import whereformer
from whereformer.models import load_pretrained


def save_original(folder: Path, texts: list[str]) -> None:
    """Write a BERT that reads 32 tokens, and a tokenizer that knows the texts."""
    tokenizer = BertTokenizerFast().train_new_from_iterator(texts, vocab_size=500)
    tokenizer.model_max_length = 32
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=500, max_position_embeddings=32, **sizes)).save_pretrained(folder)


if __name__ == "__main__":
    torch.manual_seed(0)
    texts = list(topics.values())
    with TemporaryDirectory() as folder:
        original, data, out = (Path(folder) / name for name in ("original", "documents.jsonl", "extended"))
        save_original(original, texts)
        data.write_text("\n".join(json.dumps({"text": text}) for text in texts))

        # Without training: the embeddings repeat, and windows keep two tokens with the same one apart.
        whereformer.extend(model=original, data=[data], length=128, steps=0, out=out / "untrained", quiet=True)
        whereformer.extend(model=original, data=[data], length=128, steps=8, out=out / "trained", quiet=True)

        before, untrained, trained = map(
            load_pretrained, (original, out / "untrained" / "model", out / "trained" / "model")
        )
        short, long = torch.randint(5, 500, (1, 16)), torch.randint(5, 500, (1, 128))
        with torch.no_grad():
            gap = (before(short).last_hidden_state - untrained(short).last_hidden_state).abs().max().item()
            print(f"16 tokens: states differ from the original's by at most {gap:.1e}, before training")
            print(f"128 tokens: states of shape {tuple(trained(long).last_hidden_state.shape)}")
