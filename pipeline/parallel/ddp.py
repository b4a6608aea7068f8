"""DistributedDataParallel: every rank holds the whole model and takes its lanes of the global batch."""

from contextlib import nullcontext

from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from pipeline.config import Dist
from pipeline.parallel.lane_buffers import LaneBuffers
from pipeline.parallel.lanes import Lanes, Replicated, Task, Totals, scaled
from pipeline.parallel.ordered import LaneGradients
from pipeline.ranks import Ranks


def build(task: Task, lanes: Lanes, ranks: Ranks, settings: Dist) -> "Ddp":
    """DDP under the ordered reduction, or under the backend's own all-reduce."""
    return Ddp(task, lanes, ranks, settings.reduction == "ordered")


class Ddp(Replicated):
    """One lane after another; only the last one's backward meets the other ranks."""

    def __init__(self, task: Task, lanes: Lanes, ranks: Ranks, ordered: bool):
        super().__init__(task.model)
        self._task, self._lanes, self._ranks, self.reads = task, lanes, ranks, lanes.own
        # Buffers are not broadcast: every lane starts from the same ones, and their mean is taken below.
        self._ddp = DistributedDataParallel(task.model, forward_sync_buffers=False, gradient_as_bucket_view=True)
        self._buffers = LaneBuffers(task.model, lanes)
        self._gradients = LaneGradients(lanes, ranks, [one for one in task.model.parameters() if one.requires_grad]) if ordered else None
        if self._gradients is not None:
            self._ddp.register_comm_hook(None, self._gradients.hook)
        # DDP's own reduction is a mean over ranks, ours a sum over lanes.
        self._scale = (1 if ordered else ranks.size) / lanes.global_batch

    def backward(self, step: int) -> Totals:
        """Gradients of the mean loss over the global batch, and the step's totals."""
        for parameter in self._task.model.parameters():
            parameter.grad = None
        rows: list[Tensor] = []
        self._buffers.start()
        self._ranks.heartbeat.computing(step)
        for lane in self._lanes.own:
            last = lane == self._lanes.own[-1]
            self._buffers.before_lane(lane)
            self._ranks.heartbeat.computing()
            with nullcontext() if last else self._ddp.no_sync():
                loss, row = self._task.forward(self._ddp, step, lane)
                # Backward changes no buffer: those of the last lane are on their way meanwhile.
                self._buffers.after_lane(lane)
                if last and self._gradients is None:
                    loss.register_hook(self._waits_after_backward)
                scaled(loss, self._scale).backward()  # pyright: ignore[reportUnknownMemberType]
            rows.append(row)
            if self._gradients is not None and not last:
                self._gradients.keep(lane)
        self._buffers.finish()
        return Totals(rows, self._lanes, self._ranks)

    def _waits_after_backward(self, _: Tensor) -> None:
        """Tell that the own part is done, before DDP waits for the others: it queues that later, at the last bucket."""
        Variable._execution_engine.queue_callback(self._ranks.heartbeat.waiting)  # pyright: ignore
