"""What commands print: a module each, apart from the command so that --help need not import it."""
