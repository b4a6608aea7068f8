"""Which of a rank's lanes are computed at once: where that gives the same bits as one lane after another.

Small lanes use a CPU badly. Layers and convolutions are chosen so that the bits are equal; that they are is tried with lanes of the
training all the same, before they are computed so.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from pipeline import lanes_at_once
from pipeline.parallel.lane_buffers import LaneBuffers, changing, floating
from pipeline.parallel.lanes import ComputeRow, Lanes, Task, TreeNode, draws, maximal_nodes, push, scaled
from pipeline.parallel.ordered import add_lists

log = logging.getLogger(__name__)

# Of the images of a group: larger groups gain little, and take memory.
MOST_PIXELS = 1 << 18
# So many steps tell how long a lane takes. Of a longer one, as ResNet-18's, nothing was seen to be gained, and a trial takes as long as
# three or four steps.
TIMED_STEPS, LONG_SECONDS = 2, 0.2
# Steps: where some gradient is zero throughout, equal bits tell nothing.
TRIALS = 3
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Group = range


class LaneGroups:
    """Computes the lanes of a rank, alone or at most so many at once."""

    def __init__(self, task: Task, lanes: Lanes, buffers: LaneBuffers, scale: float, most: int, pulse: Callable[[], None]):
        self._task, self._own, self._buffers, self._scale, self._pulse = task, lanes.own, buffers, scale, pulse
        parameters = list(task.model.parameters())
        self._wanted = [one for one in parameters if one.requires_grad]
        on_cpu = bool(parameters) and parameters[0].device.type == "cpu"
        # In a model of the user's own images may meet in some steps alone.
        tries = on_cpu and min(most, len(self._own)) > 1 and not task.seeds_all and lanes_at_once.supported(task.model)
        self._most, self._trials_left, self._equal = most, TRIALS, dict[int, bool]()
        self._alone: list[Group] = [range(lane, lane + 1) for lane in self._own]
        # Of the first own lane, in every step so far.
        self._began_at, self._seconds = 0.0, list[float]()
        # Once they are known.
        self._groups: list[Group] | None = None if tries else self._alone
        if tries:
            lanes_at_once.prepare(task.model)

    def of_step(self, step: int) -> list[Group]:
        """The own lanes, in groups that are each computed at once."""
        if self._groups is None and len(self._seconds) >= TIMED_STEPS:
            self._groups = self._found(step) if self._are_short() else self._alone
        return self._alone if self._groups is None else self._groups

    def _are_short(self) -> bool:
        """Whether lanes are so short that to compute several at once may be faster."""
        # Much is new in the first step.
        seconds = min(self._seconds, default=0.0)
        if seconds > LONG_SECONDS:
            log.info("lanes are computed one after another: each takes %.2f s, so that several at once would gain little", seconds)
        return seconds <= LONG_SECONDS

    def _time(self, lane: int) -> None:
        """Take note of how long the first own lane takes this thread, which is done when the second begins."""
        now = time.thread_time()
        if lane == self._own[0]:
            self._began_at = now
        elif lane == self._own[1]:
            self._seconds.append(now - self._began_at)

    def _found(self, step: int) -> list[Group] | None:
        """Which groups have equal bits at once; None where this step does not tell."""
        images, _ = self._task.batch(step, self._own[0])
        # Of one image strides are no matter, and go by who made it.
        most = min(self._most, MOST_PIXELS // (len(images) * images[0, 0].numel())) if len(images) > 1 else 1
        groups = [group for first, size in maximal_nodes(self._own) for group in halved(range(first, first + size), most)]
        for group in groups:
            equal = len(group) == 1 or self._is_equal(step, group)
            if equal is None:
                self._trials_left -= 1
                if self._trials_left > 0:
                    return None
                log.info("lanes are computed one after another: in %d steps some gradient was zero throughout", TRIALS)
            if not equal:
                return self._alone
        return groups

    def forward(self, model: nn.Module, step: int, group: Group, buffers: "Buffers") -> tuple[Tensor, list[ComputeRow]]:
        """The scaled sum of the losses of a group, and what computes each lane's row of totals."""
        self._pulse()
        if self._groups is None:
            self._time(group[0])
        buffers.before_lane(group[0])
        if len(group) == 1:
            loss, compute_row = self._task.forward(model, step, group[0])
            # Backward changes no buffer: those of the last lane are on their way meanwhile.
            buffers.after_lane(group[0])
            return scaled(loss, self._scale), [compute_row]
        lanes: list[tuple[Tensor, Tensor]] = []
        states: list[Tensor] = []
        for lane in group:
            lanes.append(self._task.begin(step, lane))
            states.append(draws(lanes[0][0].device))
        with lanes_at_once.at_once(states):
            losses, rows = self._task.losses(model, one_batch([images for images, _ in lanes]), [labels for _, labels in lanes])
            for index, lane in enumerate(group):
                lanes_at_once.set_statistics(index)
                buffers.after_lane(lane)
        # Each by itself: one that is no number leaves the others' gradients alone.
        return scaled(losses, self._scale).sum(), rows

    def _is_equal(self, step: int, group: Group) -> bool | None:
        """Whether so many lanes have the same bits at once as one after another; None where that cannot be told."""
        size = len(group)
        if size not in self._equal:
            alone = self._computed(step, [range(lane, lane + 1) for lane in group])
            if not alone.tells:
                return None
            together = self._computed(step, [group])
            self._equal[size] = all(same_bits(*two) for two in zip(alone.found, together.found, strict=True))
            how = "at once" if self._equal[size] else "one after another: at once they would have other bits"
            log.info("%d lanes are computed %s", size, how)
        return self._equal[size]

    def _computed(self, step: int, groups: list[Group]) -> "Trial":
        """What lanes come to, in such groups."""
        trial = Trial(self._task.model)
        stack: list[TreeNode[list[Tensor]]] = []
        for group in groups:
            with self._buffers.kept():
                loss, rows = self.forward(self._task.model, step, group, trial)
                loss.backward()  # pyright: ignore
            trial.rows += [compute_row() for compute_row in rows]
            gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in self._wanted]
            for one in self._wanted:
                one.grad = None
            push(stack, (group[0], len(group), gradients), add_lists)
        ((_, _, total),) = stack
        trial.found += [*total, *trial.rows]
        trial.tells = all(one.count_nonzero() for one in total)
        return trial


class Buffers(Protocol):
    """What is told of each lane's buffers."""

    def before_lane(self, lane: int) -> None: ...

    def after_lane(self, lane: int) -> None: ...


class Trial:
    """What lanes came to."""

    def __init__(self, model: nn.Module):
        self._buffers = changing(model)
        self.found: list[Tensor] = []
        self.rows: list[Tensor] = []
        self.tells = False

    def before_lane(self, lane: int) -> None:
        """They are where the step began: kept() sees to it."""

    def after_lane(self, lane: int) -> None:
        """Keep what a lane made of them."""
        self.found.append(floating(self._buffers))


def halved(group: Group, most: int) -> list[Group]:
    """A group in halves, until none has more lanes than that."""
    if len(group) <= max(most, 1):
        return [group]
    middle = group[0] + len(group) // 2
    return [*halved(range(group[0], middle), most), *halved(range(middle, group.stop), most)]


def one_batch(lanes: list[Tensor]) -> Tensor:
    """The images of lanes, one behind another, each as it lies in memory."""
    first = lanes[0]
    # The stride of one image alone may be any.
    strides = first[0].numel(), *first.stride()[1:]
    found = torch.empty_strided((len(first) * len(lanes), *first.shape[1:]), strides, dtype=first.dtype, device=first.device)
    for place, images in zip(found.split(len(first)), lanes, strict=True):
        place.copy_(images)
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, as 0 and -0 are not."""
    return torch.equal(*(value.view(INTEGERS[value.element_size()]) for value in (one, other)))
