"""Several machines as one job: the environment above us, the store they share, the leader's membership and the worker."""
