"""How long anyone waits for anyone; all that follows a stop request is derived from `dist.grace_seconds`."""

# One request: an engine signals every process of a job, more than once. A second request comes later than this after the first.
STORM_SECONDS = 3
# How long agents of several machines wait for each other once their ranks are done: the ranks have left by a barrier already.
EXIT_BARRIER_SECONDS = 5
# How long the others wait for a machine that was lost to come back.
RETURN_SECONDS = 600
# How long ranks may take, at least, to begin and to write the model, before they count as hung.
START_SECONDS = 120

# How long the end of a process waits for its threads that are in a call of torch: Python aborts it if it ends before them.
ENDING_SECONDS = 2.0

# How long ranks wait, beside the training, for rank 0 to take their shards of a checkpoint: its disk may be slow.
GATHERING_SECONDS = 24 * 3600

# How long ranks try to reach a store whose address a user has given; before the watchdog calls them hung.
CONNECT_SECONDS = 60

# How long the agent waits for the fork server, which may be importing torch from a slow disk, before it executes a rank instead.
FORK_SECONDS = 60


def forming_seconds(ranks: int) -> float:
    """How long a rank that is about to form an elastic group waits for the others' addresses, and for each connection to one.

    All of them have said that they are there; but they connect one after the other, and each connection takes a round trip.
    """
    return 2 + ranks / 20


def collective_seconds(timeout_seconds: int) -> int:
    """A collective's own timeout, for where the watchdog, which is earlier, is gone too."""
    return max(10 * timeout_seconds, 600)


def alarm_seconds(grace_seconds: int) -> int:
    """How long after a stop request a rank ends itself, for where nobody is left to end it."""
    return grace_seconds + 15


def lock_seconds(grace_seconds: int) -> int:
    """How long a start waits for the ranks that a killed launcher has left behind."""
    return grace_seconds + 30


def ending_seconds(grace_seconds: int) -> int:
    """How long a worker without ranks waits for its leader to end the job."""
    return grace_seconds + 30
