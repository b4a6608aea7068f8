"""One training on the machines of a Ray cluster, which schedules and no more, in a checkout that all of them see:

    ray job submit --working-dir deploy -- python ray_job.py --nodes 2 --folder /shared/lockstep

Ray uploads the folder of this file alone: what it uploads comes without .git, which DVC asks for, and goes with the job. After `--` may
stand another command than: python -m pipeline lead dvc repro. `--nodes 1:4` takes as many machines as there are, and begins again with
those that are left when one is lost; it needs dist.world_size: auto. Exits with the leader's code (docs/exit-codes.md): after 75 submit
it again. `ray job stop` leaves 3 s, or RAY_JOB_STOP_WAIT_TIME_S of the job's env_vars.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

FINAL = (0, 2, 3, 5)
# Ray hears of a process's end before that of its machine.
SETTLE_SECONDS = 5
# How long so many machines are asked for before fewer are, and the least before it is looked again who is there.
FEWER_SECONDS, LEAST_SECONDS = 10, 60
LIBC = "libc.so.6"
stops: list[int] = []


@ray.remote(max_concurrency=2)
class Machine:
    """A machine's command, which is told when it is to stop."""

    process, stopped = None, False

    def address(self, port: int) -> tuple[str, int]:
        with socket.socket() as free:
            free.bind(("", port))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, words: list[str], folder: str | None, variables: dict[str, str]) -> int:
        prctl = ctypes.CDLL(LIBC).prctl
        # Ray may end this process first: what it has started hears of it and saves (1 is PR_SET_PDEATHSIG).
        self.process = subprocess.Popen(words, cwd=folder, env=os.environ | variables, preexec_fn=lambda: prctl(1, signal.SIGTERM))
        if self.stopped:
            self.process.terminate()
        return self.process.wait()

    def stop(self) -> None:
        self.stopped = True
        if self.process:
            self.process.terminate()


def result(ref: ray.ObjectRef) -> int | None:
    """A command's exit code, or None where its machine was lost."""
    try:
        return ray.get(ref)
    except (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError):
        return None


def alive(options: argparse.Namespace) -> int:
    needed = {"CPU": options.cpus, "GPU": options.gpus}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(all(one.get(name, 0) >= number for name, number in needed.items()) for one in nodes)


def reserve(options: argparse.Namespace, least: int, most: int) -> tuple[PlacementGroup | None, int]:
    """Wait until machines are free, as many as possible; none where somebody asks to stop. What is asked for, an autoscaler provides."""
    said = False
    while not stops:
        for count in range(max(least, min(most, alive(options))), least - 1, -1):
            group = placement_group([{"CPU": options.cpus, "GPU": options.gpus}] * count, strategy="STRICT_SPREAD")
            until = time.monotonic() + (FEWER_SECONDS if count > least else LEAST_SECONDS)
            while not (ready := group.wait(1)) and not stops and time.monotonic() < until:
                if not said:
                    print(f"waiting for {count} machines with {options.cpus} CPUs and {options.gpus} GPUs free on each", flush=True)
                said = True
            if ready:
                return group, count
            remove_placement_group(group)
    return None, 0


def start(options: argparse.Namespace, group: PlacementGroup, count: int) -> tuple[int | None, bool]:
    """Run the command on so many machines; returns the leader's exit code, and whether a machine was lost."""
    try:
        on = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in range(count)]
        machines = [Machine.options(num_cpus=options.cpus, num_gpus=options.gpus, scheduling_strategy=one).remote() for one in on]
        host, port = ray.get(machines[0].address.remote(options.port))
        named = {"PET_NNODES": str(count), "PET_MASTER_ADDR": host, "PET_MASTER_PORT": str(port)}
        run = [one.run.remote(options.command, options.folder, named | {"PET_NODE_RANK": str(rank)}) for rank, one in enumerate(machines)]
        return follow(run, machines)
    except ray.exceptions.RayActorError:
        return None, True
    except ray.exceptions.RayTaskError as error:
        print(f"the command cannot be started on a machine: {error.cause}; see --folder, and that its programs are there", flush=True)
        return 4, False
    finally:
        remove_placement_group(group)


def follow(run: list[ray.ObjectRef], machines: list) -> tuple[int | None, bool]:
    """Wait for all, which are told to stop, once, when somebody asks for it or one of them is lost."""
    waiting, told, lost = run, False, False
    while waiting:
        ended, waiting = ray.wait(waiting, timeout=0.2)
        codes = [result(one) for one in ended]
        # Killed by a signal that was not ours: out of memory, as a rule.
        lost = lost or any(code is None or (code < 0 and not told) for code in codes)
        if (stops or lost) and not told:
            told = True
            for one in machines:
                one.stop.remote()
    return result(run[0]), lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1", help="how many machines: 2, or from one to three: 1:3")
    parser.add_argument("--cpus", type=int, default=1, help="of each machine")
    parser.add_argument("--gpus", type=int, default=0, help="of each machine")
    parser.add_argument("--port", type=int, default=0, help="of the leader, which without this takes any that is free")
    parser.add_argument("--folder", help="where the command runs; without this, where Ray starts it")
    parser.add_argument("--starts", type=int, default=10, help="how often it is begun at most")
    parser.add_argument("command", nargs="*", default=["python", "-m", "pipeline", "lead", "dvc", "repro"])
    options = parser.parse_args()
    least, most = (int(options.nodes.split(":")[at]) for at in (0, -1))
    ray.init(address="auto")
    # Not before: ray.init has a handler of its own, which ends the driver at once.
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    code, settled_at = 6, 0.0
    for number in range(1, options.starts + 1):
        while time.monotonic() < settled_at and not stops:
            time.sleep(0.5)
        group, count = reserve(options, least, most)
        if group is None:
            return 75
        print(f"start {number}: on {count} machines", flush=True)
        code, lost = start(options, group, count)
        print(f"start {number}: ended with {code}{', a machine was lost' if lost else ''}", flush=True)
        if stops or code in FINAL or not (lost or code == 6):
            break
        settled_at = time.monotonic() + SETTLE_SECONDS
    return 6 if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
