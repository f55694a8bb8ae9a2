"""Code that all runs share: the output folder, progress, results files and facts about the machine."""
