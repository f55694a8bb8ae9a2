"""The compare study: train every position method the same way on one text, and rank them."""
