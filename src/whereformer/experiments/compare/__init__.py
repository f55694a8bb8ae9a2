"""Train every position method alike on one text, and rank them."""
