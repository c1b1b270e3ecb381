"""Layer 3: probes, estimators, detectors."""
