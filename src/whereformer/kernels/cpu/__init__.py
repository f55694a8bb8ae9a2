"""The "blockwise" backend: attention in plain PyTorch, in memory linear in the sequence length, tuned for the CPU."""
