"""The properties study: measure what each position method can do."""
