"""The translate experiment: train a translation model, translate with it, and score translations."""
