"""The analyze experiment: read what models have learned about position."""
