"""The translate study: train a translation model, translate with it, and score translations."""
