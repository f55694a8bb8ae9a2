"""Give a Hugging Face transformers BERT another position method, and measure its effect.

The task is to predict the word to the left of each masked word, which requires a model that knows the order of words. The
same small BERT is trained three times: with its own position table, without positions, and with TISA's kernels in place of
the table.
"""

import torch
import transformers

from whereformer import attach

WORDS, LENGTH, STEPS = 12, 12, 150


def task(length, rows=32):
    """Rows in which every second word is masked; its label is the word to its left."""
    words = torch.randint(2, WORDS, (rows, length))
    labels = torch.full_like(words, -100)
    labels[:, 1::2] = words[:, ::2]
    words[:, 1::2] = 1
    return words, labels


def train(position):
    """A small BERT with a position method in place of its own; None keeps its own."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForMaskedLM(config)
    if position is not None:
        attach(model, position, keep_absolute=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        words, labels = task(LENGTH)
        model(input_ids=words, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def accuracy(model, length):
    """The share of masked words that the model fills in correctly, as text."""
    torch.manual_seed(1)
    words, labels = task(length, rows=200)
    if length > model.config.max_position_embeddings and not hasattr(model.config, "whereformer"):
        return "cannot"
    guessed = model(input_ids=words).logits.argmax(-1)
    masked = labels != -100
    return f"{(guessed[masked] == labels[masked]).float().mean():.0%}"


if __name__ == "__main__":
    print(f"words filled in after {STEPS} steps (chance: {1 / (WORDS - 2):.0%})")
    print(f"{'':28}{LENGTH} tokens   {8 * LENGTH} tokens")
    for name, position in [("BERT's own position table", None), ("no positions", "none"), ("TISA's kernels", "tisa")]:
        model = train(position)
        print(f"{name:28}{accuracy(model, LENGTH):>9}{accuracy(model, 8 * LENGTH):>12}")
