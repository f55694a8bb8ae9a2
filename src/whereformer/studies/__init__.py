"""The experiments behind the commands, one package each."""
