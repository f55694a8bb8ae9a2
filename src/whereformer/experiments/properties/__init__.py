"""Measure what each position method can do."""
