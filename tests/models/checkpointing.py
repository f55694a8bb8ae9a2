"""Activation checkpointing under the name that this release of transformers has for it; later ones renamed it."""

from dataclasses import fields

from transformers import TrainingArguments


def checkpoint_activations(model, **options):
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options or None)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None)


def training_option():
    """The name of the option that makes a Trainer do it."""
    names = {field.name for field in fields(TrainingArguments)}
    return "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
