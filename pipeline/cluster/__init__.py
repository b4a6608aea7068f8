"""Several machines as one job: who is there, the store they share, and the worker."""
