"""One loop, and the remedies that it asks: pipeline, routes, reductions, shares."""
