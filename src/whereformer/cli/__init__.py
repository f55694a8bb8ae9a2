"""The command line: one module per command. Only this package knows about flags and terminals."""
