"""Layer 2: Timeline and Schedule to pictures: ASCII, SVG/HTML, PNG, Chrome trace."""
