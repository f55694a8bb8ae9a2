"""The probe study: synthetic tasks with known answers, which show what each position method can do."""
