"""Pages: what a report says, and how it looks."""
