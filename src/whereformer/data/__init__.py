"""Reading text, tables and parallel text, and turning them into batches for models."""
