"""`dist.lanes_per_rank: auto` while it trains: lanes move away from a rank that has become slow."""

from dataclasses import replace

import torch

from pipeline.parallel.lanes import Lanes
from pipeline.parallel.shares import shares
from pipeline.ranks import Ranks

# Lanes move where a step is expected to take less than this share of its time: what is measured varies.
WORTH = 0.9


class Speeds:
    """How long every rank needs for a lane."""

    def __init__(self, own_seconds: float):
        # Of this rank, which takes it along into the next group.
        self._own_seconds = own_seconds

    def shared_out(self, lanes: Lanes, group: Ranks) -> Lanes:
        """The same lanes, so that the slowest rank is done as early as possible; every rank must call it."""
        row = torch.tensor([[self._own_seconds]], dtype=torch.float64, device=group.device)
        seconds = group.gather_rows(row, [1] * group.size).flatten().tolist()
        return replace(lanes, per_rank=shares(lanes.count, seconds))

    def learn(self, figures: dict[str, float], lanes: Lanes) -> bool:
        """Take note of how long the ranks' steps have been; returns, on all ranks alike, whether other shares would be faster."""
        steps = [figures[f"system/rank_{rank}_step_milliseconds"] / 1000 for rank in range(len(lanes.per_rank))]
        if not all(steps):
            # No step was made since.
            return False
        seconds = [step / own for step, own in zip(steps, lanes.per_rank, strict=True)]
        self._own_seconds = seconds[lanes.rank]
        best = max(own * one for own, one in zip(shares(lanes.count, seconds), seconds, strict=True))
        return best < WORTH * max(steps)
