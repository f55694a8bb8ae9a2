"""Commands, a module each; :mod:`whereformer.cli` lists them."""
