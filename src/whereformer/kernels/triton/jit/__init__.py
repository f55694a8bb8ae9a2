"""The Triton kernels of ``backend="triton"``: one tile of scores at a time, nothing of size n_q x n_k in memory.

Throughout, a *tile* is BLOCK_M queries by BLOCK_N keys (transposed in the kernel of the keys' gradients, so that its
products need no transposed operand), and scores are in units of log2, because exp2 is what the hardware has.

Nothing is added to memory that another program adds to as well, so that results are the same bits from run to run.

- ``tiles``: rows from and to memory.
- ``scores``: the scores of a tile.
- ``areas``: which tiles read which part of an offset table.
- ``offsets``: sums over the keys of a row that share an offset.
- ``forward``, ``query_gradients``, ``key_gradients``, ``tile_gradients``: the kernels.

Only these modules import Triton, which does not come with every build of torch.
"""
