"""The properties experiment: measure what each position method can do."""
