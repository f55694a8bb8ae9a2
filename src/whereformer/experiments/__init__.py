"""The jobs behind the commands, each in a package of its own."""
