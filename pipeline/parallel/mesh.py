"""Ranks in rows and columns: those of a row hold one copy of the model together, those of a column the same part of it."""

from datetime import timedelta

import torch.distributed as dist

from pipeline.config import Dist
from pipeline.ranks import Ranks
from pipeline.timeouts import collective_seconds


def groups(ranks: Ranks, settings: Dist) -> "tuple[dist.ProcessGroup, dist.ProcessGroup | None]":
    """The group of this rank's row, and that of its column if there are several rows; every rank must call it."""
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    if settings.replicas == 1:
        return world, None
    width, timeout = ranks.size // settings.replicas, timedelta(seconds=collective_seconds(settings.timeout_seconds))
    rows = [list(range(first, first + width)) for first in range(0, ranks.size, width)]
    columns = [list(range(first, ranks.size, width)) for first in range(width)]
    row, column = (dist.new_subgroups_by_enumeration(some, timeout=timeout)[0] for some in (rows, columns))
    assert isinstance(row, dist.ProcessGroup)
    assert isinstance(column, dist.ProcessGroup)
    return row, column
