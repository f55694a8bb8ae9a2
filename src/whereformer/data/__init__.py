"""Reading text, tables and parallel text, and turning them into rows and batches for models."""
