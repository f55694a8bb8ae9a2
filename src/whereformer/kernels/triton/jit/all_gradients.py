"""The kernel of all gradients in one pass, for calls whose bits may differ from run to run."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .key_gradients import gradients_of_keys


@triton.jit
def all_gradients(inputs, known, gradients, shared, terms, pairs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute the gradients of one block of keys of one head, and add to what all blocks of keys share.

    The scores and their gradients are computed once for both: five products, as in flash attention.
    """
    gradients_of_keys(inputs, known, gradients, shared, terms, pairs, False, BLOCK_M, BLOCK_N)
