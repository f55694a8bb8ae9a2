"""Attention on the CPU, with memory that grows with the sequence and not with its square."""
