"""Decodes one token at a time with a cache of keys and values, with the same results as for the whole sequence at once.

Positions are values: the position of a new query starts where the cache ends, so position methods need no code for caching.
"""

import time

import torch

from whereformer import Place, Positions, attention, build_position

LENGTH, HEADS, WIDTH = 256, 4, 16

if __name__ == "__main__":
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, LENGTH, WIDTH)
    hidden = torch.randn(1, LENGTH, HEADS * WIDTH)

    for name in ("alibi", "t5", "tisa", "rope", "shaw"):
        position = build_position(name, hidden_size=HEADS * WIDTH, num_heads=HEADS, causal=True)

        def attend(first, last, position=position):
            """Attend from the queries ``first`` to ``last - 1`` to all keys before ``last``."""
            queries, keys = Positions(first, 1, last - first), Positions(0, 1, last)
            new, known = Place(queries, queries), Place(queries, keys)
            # Queries and keys are rotated at their own positions; of these methods, only rope rotates.
            turned = position.rotate(query[:, :, first:last], key[:, :, first:last], value[:, :, first:last], new)[0]
            at_keys = Place(keys, keys)
            _, past_key, past_value = position.rotate(*(each[:, :, :last] for each in (query, key, value)), at_keys)
            terms = position.terms(hidden[:, first:last], known)
            return attention(
                turned, past_key, past_value, terms, causal=True, query_positions=queries, key_positions=keys
            )

        with torch.no_grad():
            whole = attend(0, LENGTH)
            start = time.perf_counter()
            steps = [attend(token, token + 1) for token in range(LENGTH)]
            each = (time.perf_counter() - start) / LENGTH * 1e3
        difference = (torch.cat(steps, 2) - whole).abs().max().item()
        print(f"{name:6} one token at a time differs by at most {difference:.1e}, {each:.2f} ms per token")
