"""The bench study: time attention with each kind of term."""
