"""Attention on NVIDIA GPUs, in Triton."""
