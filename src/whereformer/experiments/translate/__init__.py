"""Train a translation model, translate with it, and score translations."""
