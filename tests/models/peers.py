"""What tests ask of transformers: small models to compare with, and a short training."""

import transformers

LAYERS = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
SIZES = {"vocab_size": 50, **LAYERS, "max_position_embeddings": 40}
"""Sizes of an encoder, by their names in transformers' BERT and its kin."""


def of_both_stacks(**sizes):
    """Sizes that an encoder and a decoder have alike, as ``encoder_...`` and ``decoder_...``."""
    return {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in sizes.items()}


def trainer_arguments(folder, steps):
    """A training of a few steps that saves and reports nothing."""
    return transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
