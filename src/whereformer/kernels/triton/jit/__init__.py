"""The Triton kernels of ``backend="triton"``: they compute one tile of scores at a time, in O(n) memory.

A *tile* is BLOCK_M queries by BLOCK_N keys. The kernel of the keys' gradients transposes it, so that its products need
no transposed operand. Scores are in units of log2, because the hardware has exp2. No two programs add to the same
memory, so results are the same bits from run to run.

Comments after lines give the shapes of tensors. TILE is (BLOCK_M, BLOCK_N), or (BLOCK_N, BLOCK_M) if tiles are
transposed. Widths, such as head_dim, are rounded up to powers of two.

Only these modules import Triton, because not every build of torch comes with it.
"""
