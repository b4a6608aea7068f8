"""The pods of deploy/kubernetes as containers on a Docker engine: what Kubeflow Trainer, JobSet and the Job controller make of the files.

The rules are Trainer's (names, PET_*), JobSet's (host names) and batch/v1's (a new pod for one that failed, podFailurePolicy). There is no
API server: what webhooks refuse, what Kueue or a scheduler decide, and real volumes stay unseen.
"""

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.kit.compose import sh
from tests.kit.experiment import ROOT

FILES = ROOT / "deploy" / "kubernetes"
TRAINER_PORT = 29500
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
USER = 1000


def documents(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a file, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((FILES / name).read_text())}


class Job:
    """The job `node` of a JobSet: its pods, its container, and what its policies say."""

    def __init__(self, objects: dict[str, dict[str, Any]]):
        trained = objects.get("TrainJob")
        owner = trained or objects["JobSet"]
        self.name = owner["metadata"]["name"]
        jobset = objects["TrainingRuntime"]["spec"]["template"]["spec"] if trained else owner["spec"]
        (job,) = (one["template"] for one in jobset["replicatedJobs"] if one["name"] == "node")
        self.spec = job["spec"]
        self.pod = self.spec["template"]["spec"]
        (self.container,) = (one for one in self.pod["containers"] if one["name"] == "node")
        if trained:
            # Only where the runtime says that these are the trainer's pods, and the job has the section.
            assert job["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
            self.size = trained["spec"]["trainer"]["numNodes"]
            values = (self.size, trained["spec"]["trainer"]["numProcPerNode"], f"{self.host(0)}.{self.name}", TRAINER_PORT)
            names = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT")
            self.env = {name: str(value) for name, value in zip(names, values, strict=True)} | {"PET_NODE_RANK": INDEX}
        else:
            self.size = self.spec["completions"]
            env = self.container["env"]
            self.env = {one["name"]: one.get("value") or one["valueFrom"]["fieldRef"]["fieldPath"] for one in env}

    def host(self, index: int) -> str:
        return f"{self.name}-node-0-{index}"

    def action(self, exit_code: int) -> str:
        """What podFailurePolicy does about a pod that ended; the first rule that fits counts."""
        for rule in self.spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes and codes["containerName"] == "node" and (exit_code in codes["values"]) == (codes["operator"] == "In"):
                return rule["action"]
        return "Count"


class Cluster:
    """A job's pods on a network of their own, with a folder as the volume."""

    def __init__(self, job: Job, image: str, volume: Path, params: Path):
        self.job, self._image, self._volume, self._params = job, image, volume, params
        self.id = f"test{os.getpid()}-{volume.parent.name[-20:]}".replace("_", "-")
        self.pods: dict[int, str] = {}
        self.ended: list[tuple[int, int, str]] = []
        self.addresses: dict[int, set[str]] = {index: set() for index in range(job.size)}
        self.failures, self.outcome, self._made = Counter[int](), "", 0
        sh("docker", "network", "create", self.id)
        for index in range(job.size):
            self._start(index)

    def _start(self, index: int) -> None:
        job, pod, container = self.job, self.job.pod, self.job.container
        self._made += 1
        name = f"{self.id}-{index}-{self._made}"
        security, user = container["securityContext"], pod["securityContext"]
        assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}
        places = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        sources = {one["name"]: one for one in pod["volumes"]}
        assert sources["experiment"]["persistentVolumeClaim"] and sources["params"]["configMap"]
        assert sources["shm"]["emptyDir"]["medium"] == "Memory"
        words = ["--network", self.id, "--network-alias", f"{job.host(index)}.{job.name}", "--hostname", job.host(index)]
        # The pause process is then pid 1.
        words += ["--init"] * pod["shareProcessNamespace"]
        words += ["--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--group-add", str(user["fsGroup"])]
        words += ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--tmpfs", f"{places['tmp']}:mode=1777"]
        words += ["--shm-size", sources["shm"]["emptyDir"]["sizeLimit"].replace("Gi", "g")]
        words += ["--volume", f"{self._volume}:{places['experiment']}", "--volume", f"{self._params}:{places['params']}:ro"]
        for key, value in job.env.items():
            words += ["--env", f"{key}={str(index) if value == INDEX else value}"]
        entrypoint, *rest = [*container["command"], *container["args"]]
        sh("docker", "run", "--detach", "--name", name, *words, "--entrypoint", entrypoint, self._image, *rest)
        self.pods[index] = name
        self.addresses[index].add(
            sh("docker", "inspect", "--format", f'{{{{(index .NetworkSettings.Networks "{self.id}").IPAddress}}}}', name)
        )

    def reconcile(self) -> None:
        """What the Job controller does about pods that have ended."""
        for index, name in list(self.pods.items()):
            state = json.loads(sh("docker", "inspect", "--format", "{{json .State}}", name))
            if state["Status"] != "exited":
                continue
            code = state["ExitCode"]
            action = "Complete" if code == 0 else self.job.action(code)
            self.ended.append((index, code, action))
            del self.pods[index]
            self.failures[index] += action == "Count"
            if action == "FailJob" or self.failures[index] > self.job.spec["backoffLimitPerIndex"]:
                # Of maxFailedIndexes: 0, one index is too many.
                self.outcome = "Failed"
            elif action == "Complete":
                done = str(index) in self.job.spec["successPolicy"]["rules"][0]["succeededIndexes"].split(",")
                self.outcome = "Complete" if done and not self.outcome else self.outcome
            elif not self.outcome:
                # Another takes the address that is free now.
                sh(
                    "docker",
                    "run",
                    "--detach",
                    "--name",
                    f"{name}-address",
                    "--network",
                    self.id,
                    "--entrypoint",
                    "sleep",
                    self._image,
                    "900",
                )
                self._start(index)

    def until(self, condition: Callable[[], Any], seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            self.reconcile()
            time.sleep(0.3)

    def kill(self, index: int) -> None:
        sh("docker", "kill", self.pods[index])

    def drain(self) -> None:
        """Every node at once: SIGTERM, the grace, SIGKILL."""
        grace = str(self.job.pod["terminationGracePeriodSeconds"])
        stopping = [subprocess.Popen(["docker", "stop", "--time", grace, name], stdout=subprocess.DEVNULL) for name in self.pods.values()]
        assert [one.wait() for one in stopping] == [0] * len(stopping)

    def logs(self) -> str:
        names = [name for name in self._containers() if not name.endswith("-address")]
        return "\n".join(f"== {name}\n{sh('docker', 'logs', name, expect=None)}" for name in names) + str(self.ended)

    def _containers(self) -> list[str]:
        return sh("docker", "ps", "--all", "--filter", f"name={self.id}-", "--format", "{{.Names}}").split()

    def remove(self) -> None:
        if names := self._containers():
            sh("docker", "rm", "--force", *names)
        sh("docker", "network", "rm", self.id, expect=None)
