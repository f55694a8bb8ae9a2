"""The distill-positions experiment: replace position embeddings by TISA kernels, and measure what that costs."""
