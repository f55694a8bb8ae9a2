"""What all studies are made of: recipes, the folder of a run, the training loop, and reports."""
