"""Replace position embeddings by TISA's kernels, and measure what is left of the model."""
