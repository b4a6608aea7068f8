"""Which machines an engine (Kubeflow, a Slurm wrapper) has given this job: read from the PET_* variables that torchrun reads too."""

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config import Config, ConfigError, PeerError
from pipeline.hardware.network import interface, own_address, split

# torchrun's default.
DEFAULT_PORT = 29500
RESOLVE_SECONDS = 60


@dataclass(frozen=True)
class ClusterEnvironment:
    """How many machines there are, whether this one leads, and where the leader listens."""

    nodes: int
    leads: bool
    host: str
    port: int


def detect(config: Config, variables: Mapping[str, str]) -> ClusterEnvironment | None:
    """Return what the PET_* variables say, or None where they are not set or name only one machine."""
    # A range such as 1:4 is for jobs that change their size while they run; this one takes the upper end.
    nnodes = variables.get("PET_NNODES", "1").rpartition(":")[2]
    if not nnodes.isdigit():
        raise ConfigError(f"PET_NNODES: {variables['PET_NNODES']!r} is no number of machines")
    nodes = int(nnodes)
    if nodes <= 1:
        return None
    ranks, size = variables.get("PET_NPROC_PER_NODE", ""), config.dist.world_size
    if ranks.isdigit() and int(ranks) * nodes != size:
        raise ConfigError(f"dist.world_size: {size}, but PET_* give {nodes} machines of {ranks}; set world_size: {nodes * int(ranks)}")
    endpoint = variables.get("PET_RDZV_ENDPOINT") or variables.get("PET_MASTER_ADDR")
    if not endpoint:
        raise ConfigError("PET_NNODES: several machines, and neither PET_RDZV_ENDPOINT nor PET_MASTER_ADDR says where they meet")
    port = variables.get("PET_MASTER_PORT") or DEFAULT_PORT
    host, number = split(endpoint if ":" in endpoint else f"{endpoint}:{port}")
    node_rank = variables.get("PET_NODE_RANK")
    return ClusterEnvironment(nodes, node_rank == "0" if node_rank else _is_this_machine(host, number), host, number)


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
