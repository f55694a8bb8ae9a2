"""Weights of other models: their names, their layouts, and how they are loaded."""
