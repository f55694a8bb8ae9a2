"""The "triton" backend: fused attention kernels for NVIDIA GPUs."""
