"""Code that all training jobs share: the optimizer, the Trainer, the run's folder and held-out scores."""
