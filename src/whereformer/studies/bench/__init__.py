"""The bench experiment: time attention with each kind of term."""
