"""The parts that all studies share: recipes, the folder of a run, the training loop, and reports."""
