"""One run's folder: identity, lock, status, checkpoints; no torch and no processes."""
