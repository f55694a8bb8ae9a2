"""Train a small encoder, then read what each head learned about distance.

The task needs the word two places to the left. T5's method has one number per head and bucket of offsets, so its curve
shows whether a head looks there. The TISA kernel that is nearest to the curve describes the same with three numbers.
"""

import math

import torch

from whereformer import EncoderConfig, EncoderForMaskedLM
from whereformer.analysis import fit_tisa

WORDS, LENGTH, DISTANCE, STEPS = 12, 16, 2, 150
BLOCKS = "▁▂▃▄▅▆▇█"


def train():
    """An encoder that fills in masked words with the one ``DISTANCE`` places to their left."""
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_attention_heads=4,
        blocks="1",
        position="t5",
        norm="pre",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = EncoderForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        words = torch.randint(2, WORDS, (32, LENGTH))
        labels = torch.full_like(words, -100)
        labels[:, DISTANCE::4] = words[:, :-DISTANCE:4]
        words[:, DISTANCE::4] = 1
        loss = model(words, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, loss.item()


def sparkline(numbers):
    """Draw each number as a block whose height lies between the lowest and the highest number."""
    low, high = min(numbers), max(numbers)
    return "".join(BLOCKS[round((number - low) / (high - low) * (len(BLOCKS) - 1))] for number in numbers)


if __name__ == "__main__":
    model, loss = train()
    print(f"loss after {STEPS} steps: {loss:.3f} (guessing: {math.log(WORDS - 2):.3f})\n")
    offsets = torch.arange(-6, 7)
    curves = model.encoder.position.curve(offsets).detach()
    fits = fit_tisa(curves, num_kernels=1, constant=True)
    print(f"{'offsets -6 .. 6':>24}   lowest, highest   nearest kernel")
    for head, curve in enumerate(curves.tolist()):
        height, center, share = (part.flatten()[head].item() for part in (fits.amplitude, fits.center, fits.explained))
        print(
            f"head {head}    {sparkline(curve)}    {min(curve):+.2f}, {max(curve):+.2f}     "
            f"height {height:+.2f} at offset {center:+.1f}, explains {share:.0%}"
        )
