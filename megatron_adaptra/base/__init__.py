"""Units, files, logs, waits and processes: nothing of pipelines."""
