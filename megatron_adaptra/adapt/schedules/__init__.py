"""Changes of a schedule, for the remedies pipeline and routes alike."""
