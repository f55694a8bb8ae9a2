"""What every run shares: its folder, its progress, its results, and what it was measured on."""
