"""Where this machine stands in an engine's job: read from the variables of Slurm, SkyPilot or dstack, or from torchrun's PET_*."""

import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config import Config, ConfigError, PeerError
from pipeline.hardware.network import interface, own_address, split

# torchrun's default.
DEFAULT_PORT = 29500
RESOLVE_SECONDS = 60
# Below the ports that systems give to outgoing connections: jobs that share a machine take different ones.
SLURM_PORTS = range(20000, 30000)


@dataclass(frozen=True)
class ClusterEnvironment:
    """How many machines there may be, whether this one leads, where the leader listens, who says so, and how many it needs at least."""

    nodes: int
    leads: bool
    host: str
    port: int
    engine: str = "PET_*"
    least: int = 0


@dataclass(frozen=True)
class Engine:
    """The variables in which an engine tells a process of its place; `hosts` names all machines, the leader first, or the leader alone."""

    name: str
    nodes: str
    rank: str
    hosts: str


# Who starts processes within the other one comes first: SkyPilot has a backend on Slurm. Of Slurm's the variables of a *step*: in a batch
# shell, which runs on one machine alone, those of the job look as if it were the first of many.
ENGINES = (
    Engine("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
    Engine("dstack", "DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP"),
    Engine("Slurm", "SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_STEP_NODELIST"),
)


def detect(config: Config, variables: Mapping[str, str]) -> ClusterEnvironment | None:
    """Return this machine's place among those of a job, or None where nothing names more than one; PET_* go before an engine's own."""
    engine = next((one for one in ENGINES if variables.get(one.nodes)), None)
    named = _named_by(engine, variables) | {name: value for name, value in variables.items() if name.startswith("PET_") and value}
    least, nodes = machines("PET_NNODES", named.get("PET_NNODES", "1"))
    if engine is not None:
        _check(engine, nodes, variables)
    if nodes <= 1:
        return None
    ranks, size = named.get("PET_NPROC_PER_NODE", ""), config.dist.world_size
    if ranks.isdigit() and int(ranks) * nodes != size and not config.dist.auto:
        raise ConfigError(f"dist.world_size: {size}, but PET_* give {nodes} machines of {ranks}; set world_size: {nodes * int(ranks)}")
    named_port = named.get("PET_MASTER_PORT") or str(DEFAULT_PORT)
    meeting, master = named.get("PET_RDZV_ENDPOINT", ""), named.get("PET_MASTER_ADDR", "")
    if not meeting and not master:
        raise ConfigError("PET_NNODES: several machines, and neither PET_RDZV_ENDPOINT nor PET_MASTER_ADDR says where they meet")
    # An address of IPv6 has colons too, and no port behind it.
    host, port = split(meeting if ":" in meeting else f"{meeting or (f'[{master}]' if ':' in master else master)}:{named_port}")
    node_rank = named.get("PET_NODE_RANK")
    leads = node_rank == "0" if node_rank else _is_this_machine(host, port)
    # With a number of ranks in params.yaml there is one number of machines to spread them over.
    return ClusterEnvironment(nodes, leads, host, port, engine.name if engine else "PET_*", least if config.dist.auto else nodes)


def machines(name: str, said: str) -> tuple[int, int]:
    """Return how many machines a job needs and how many it takes, said as a number or as a range such as 1:4."""
    found = re.fullmatch(r"(?:(\d{1,5}):)?(\d{1,5})", said)
    if not found or int(found[1] or 0) > int(found[2]):
        raise ConfigError(f"{name}: {said!r} is no number of machines, nor a range such as 1:4")
    return int(found[1] or found[2]), int(found[2])


def _named_by(engine: Engine | None, variables: Mapping[str, str]) -> dict[str, str]:
    """What an engine says, by torchrun's names."""
    if engine is None:
        return {}
    found = {"PET_NNODES": variables[engine.nodes], "PET_NODE_RANK": variables.get(engine.rank, "")}
    found["PET_MASTER_ADDR"] = first_host(variables.get(engine.hosts, ""))
    if engine.name == "Slurm":
        job, step = (int(variables.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        found["PET_MASTER_PORT"] = str(SLURM_PORTS[(job + step) % len(SLURM_PORTS)])
    return found


def first_host(hosts: str) -> str:
    """Return the first of some hosts: one a line, or as Slurm shortens them, n[1-3,5]-ib,m7; there may be no scontrol in an image."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", hosts).split("\n")[0].split(",")[0].strip()


def _check(engine: Engine, nodes: int, variables: Mapping[str, str]) -> None:
    """Raise ConfigError where an engine's machines would not find their places."""
    rank, asked = variables.get(engine.rank, ""), variables.get("PET_NODE_RANK")
    if asked and variables[engine.nodes] == str(nodes) and asked != rank:
        why = f"PET_NODE_RANK: {asked} on machine {rank} of {nodes}, as {engine.rank} says"
        raise ConfigError(f"{why}: it was expanded too early; leave it out, or set it where every machine's own shell reads it")
    if engine.name == "Slurm" and variables.get("SLURM_STEP_NUM_TASKS", variables[engine.nodes]) != variables[engine.nodes]:
        of_step = variables[engine.nodes]
        tasks = f"{variables['SLURM_STEP_NUM_TASKS']} tasks on {of_step} machine{'s' * (of_step != '1')}"
        raise ConfigError(f"SLURM_STEP_NUM_TASKS: {tasks}; one a machine starts all its ranks: srun --ntasks-per-node=1")


def _is_this_machine(host: str, port: int) -> bool:
    """Return whether a name is this machine's: a route to oneself starts at the address that it ends at."""
    until = time.monotonic() + RESOLVE_SECONDS
    while True:
        try:
            addresses = {str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
            return own_address(host, port) in addresses and any(interface(address) for address in addresses)
        except OSError as error:
            # Names become known while an engine's machines start.
            if time.monotonic() > until:
                raise PeerError(f"{host}: is no known name after {RESOLVE_SECONDS} s ({error.strerror}); set PET_NODE_RANK") from None
            time.sleep(1)
