"""Decodes one token at a time with a cache of keys and values, with the same results as for the whole sequence at once.

Positions are values: a new query starts where the cache ends, so most position methods need no code for caching. Those
that read all keys (``position.reads_keys``, such as fox) need a cache of keys as they are before ``apply_hooks``.
"""

import time

import torch

from whereformer import Positions, Site, attention, build_position

LENGTH, HEADS, WIDTH = 256, 4, 16

if __name__ == "__main__":
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, LENGTH, WIDTH)
    hidden = torch.randn(1, LENGTH, HEADS * WIDTH)

    for name in ("alibi", "t5", "tisa", "rope", "shaw"):
        position = build_position(name, hidden_size=HEADS * WIDTH, num_heads=HEADS, causal=True)

        def decode(first, last, cache, position=position):
            """Attend from the new tokens ``first`` to ``last - 1`` to all before ``last``; earlier ones are cached."""
            new, known = Positions(first, 1, last - first), Positions(0, 1, last)
            tokens = (each[:, :, first:last] for each in (query, key, value))
            # New queries and keys are rotated at their own positions, and the terms are those of all keys.
            site = Site(new, known, causal=True, new_key_positions=new)
            turned, *pair, terms = position.apply_hooks(hidden[:, first:last], *tokens, site)
            cache[:] = [torch.cat(both, 2) for both in zip(cache, pair, strict=True)] if cache else pair
            return attention(turned, *cache, terms, **site.options(turned))

        with torch.no_grad():
            whole = decode(0, LENGTH, [])
            cache = []
            start = time.perf_counter()
            steps = [decode(token, token + 1, cache) for token in range(LENGTH)]
            each = (time.perf_counter() - start) / LENGTH * 1e3
        difference = (torch.cat(steps, 2) - whole).abs().max().item()
        print(f"{name:6} one token at a time differs by at most {difference:.1e}, {each:.2f} ms per token")
