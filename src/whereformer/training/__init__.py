"""What every training shares: the optimizer, the Trainer, the run's folder and held-out scores."""
