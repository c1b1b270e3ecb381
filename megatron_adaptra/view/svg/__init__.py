"""Charts and timelines as SVG."""
