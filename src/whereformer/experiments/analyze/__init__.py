"""Look at what models have learned about position."""
