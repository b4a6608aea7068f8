"""Elastic containers: some are killed, and others come, while the rest goes on."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.compose import Project, sh
from tests.kit.experiment import PACED_MODEL, Experiment, settings
from tests.kit.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]
Note = Callable[[str, object], None]
DIST = {"world_size": "auto", "batch_size_per_gpu": None, "global_batch": 96, "lanes": 8, "elastic": True}
LONG = settings(data__name="synthetic:6000", train__epochs=12) | {"model": {"name": "mine.py:build"}, "dist": DIST}


class Elastic:
    """As many containers as there are, slowly."""

    def __init__(self, job: Project):
        self.job, self.slow = job, job.folder / "slow"
        job.set(LONG)
        params = job.folder / "params.yaml"
        written: dict[str, Any] = yaml.safe_load(params.read_text())
        # `set` has resolved it.
        params.write_text(yaml.safe_dump(written | {"dist": written["dist"] | {"world_size": "auto"}}))
        (job.folder / "mine.py").write_text(PACED_MODEL)
        self.slow.touch()

    def ranks(self) -> list[int]:
        """How many ranks there have been."""
        lines = [line for path in self.job.folder.glob("runs/*/journal.jsonl") for line in path.read_text().split("\n")[:-1]]
        return [line["ranks"] for line in map(json.loads, lines) if line["kind"] == "ranks"]

    def wait_for(self, ranks: int) -> None:
        until(lambda: self.ranks()[-1:] == [ranks], seconds=180, every_seconds=0.02)

    def workers(self) -> list[str]:
        return self.job.compose("ps", "--quiet", "worker").split()


def digest_of_one(folder: Path) -> str:
    """What the same training ends with outside, left alone."""
    folder.mkdir()
    (folder / "mine.py").write_text(PACED_MODEL)
    alone = Experiment(folder)
    alone.params.write_text(yaml.safe_dump(LONG | {"dist": DIST | {"elastic": False}}))
    alone.run("prepare")
    alone.run("train")
    return alone.json("models/receipt.json")["weights_sha256"]


@pytest.mark.fault(36, "of three elastic containers `docker kill` of one, then of another; `docker compose up --scale` brings two")
def test_elastic_containers_are_killed_and_others_come(project: Callable[..., Project], tmp_path: Path, record_property: Note) -> None:
    expected, job = digest_of_one(tmp_path / "alone"), project("elastic")
    elastic, seconds = Elastic(job), list[float]()
    job.compose("up", "--detach", WORKERS="2", WORKERS_RANGE="0:2")
    elastic.wait_for(6)
    for left in (4, 2):
        sh("docker", "kill", elastic.workers()[0])
        killed_at = time.monotonic()
        elastic.wait_for(left)
        seconds.append(time.monotonic() - killed_at)
    assert not elastic.workers()
    job.compose("up", "--detach", "--no-deps", "--scale", "worker=2", "worker", WORKERS_RANGE="0:2")
    elastic.wait_for(6)
    elastic.slow.unlink()
    assert job.wait("leader") == 0, job.compose("logs", "leader")
    assert job.receipt()["weights_sha256"] == expected
    assert not list(job.folder.glob("runs/*/logs/*/*/attempt_0/lost_*")), "nobody was started again"
    said = job.compose("logs", "leader")
    assert said.count("is lost; the others go on") == 2, said
    assert said.count(" joins") == 2, said
    assert [run["info"]["status"] for run in job.runs()] == ["FINISHED"]
    happened = f"bit-equal, groups of {elastic.ranks()} ranks; {seconds[0]:.1f} and {seconds[1]:.1f} s from `docker kill` on"
    record_property("happened", happened)
