"""The tables that commands print: one module per command, so that --help need not import them."""
