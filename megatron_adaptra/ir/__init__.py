"""Layer 0: the values that all other packages exchange. Standard library only.

Read first: `op`, `schedule` (what each stage runs, in order), `program` (the same with messages),
`check`, `conditions` (what is known of a job) and `timeline` (when each op ran).
"""
