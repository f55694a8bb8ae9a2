"""The analyze study: read what models have learned about position."""
