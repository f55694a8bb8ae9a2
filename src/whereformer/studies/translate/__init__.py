"""The translate study: train a translation model, and translate with it."""
