"""The Triton kernels of ``backend="triton"``: they compute one tile of scores at a time, in O(n) memory.

Throughout, a *tile* is BLOCK_M queries by BLOCK_N keys. It is transposed in the kernel of the keys' gradients, so that
its products need no transposed operand. Scores are in units of log2, because the hardware has exp2. No two
programs add to the same memory, so results are the same bits from run to run.

Only these modules import Triton, because not every build of torch comes with it.
"""
