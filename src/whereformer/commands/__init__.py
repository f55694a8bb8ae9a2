"""One module a command: its options, and what it calls; heavy imports wait until it runs."""
