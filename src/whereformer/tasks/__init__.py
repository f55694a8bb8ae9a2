"""What the commands do: data, objectives and experiments."""
