"""One rank of an elastic training, started by the elastic agent: `python -m pipeline.elastic.train_rank JOB`."""

import gc
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.cluster.store import connect
from pipeline.elastic.generations import STORE, Member, name_of
from pipeline.elastic.lookout import Lookout
from pipeline.elastic.process_groups import ProcessGroups
from pipeline.elastic.training import ElasticTraining
from pipeline.hardware.network import split
from pipeline.heartbeat import Heartbeat
from pipeline.job import Job
from pipeline.parallel.shares import seconds_of
from pipeline.training import train_rank
from pipeline.training.work import begin

PRELOAD = train_rank.PRELOAD


def main(job: Job) -> None:
    """Train as one of those that are there, and write what the launcher publishes."""
    train_rank.fix_bits(job.config.dist.threads_per_rank)
    store, name = os.environ[STORE], name_of(os.environ)
    heartbeat = Heartbeat(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent)
    groups = ProcessGroups(job, name, store, heartbeat)
    # The CPUs that a lost rank has left are this one's.
    work = begin(job, groups.ranks.device, lambda own: own)
    # Kernels are compiled and chosen at their first call: nobody is to wait for that.
    own_seconds = seconds_of(0, work.task, heartbeat, times=1)
    member = Member(connect(*split(store), os.environ["TORCHELASTIC_RUN_ID"]), name)
    with Lookout(member, groups, heartbeat, groups.in_vain).looking(), ThreadPoolExecutor(1) as executor:
        training = ElasticTraining(work, member, groups, executor, own_seconds)
        # What is imported stays: whoever leaves a group has its remains collected, and would look through all of torch.
        gc.freeze()
        member.ready()
        training.run()
    logging.getLogger(__name__).info("this rank is done")


if __name__ == "__main__":
    train_rank.run_as_rank(main)
