"""The distill-positions study: replace position embeddings by TISA kernels, and measure what that costs."""
