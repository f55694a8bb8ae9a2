"""Text, tables and parallel text, and the rows and batches that models read."""
