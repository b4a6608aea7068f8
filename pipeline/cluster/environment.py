"""The place of this machine in a job that an engine has spread: what torchrun's own PET_* variables say."""

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config import Config, ConfigError, PeerError
from pipeline.hardware.network import interface, own_address, split

# torchrun's.
DEFAULT_PORT = 29500
NAME_SECONDS = 60


@dataclass(frozen=True)
class ClusterEnvironment:
    """What an engine has decided."""

    nodes: int
    leads: bool
    host: str
    port: int


def engine(config: Config, variables: Mapping[str, str]) -> ClusterEnvironment | None:
    """What PET_* say, or None where there is no engine or only one machine; every machine runs the same command then."""
    # A range such as 1:4 is for jobs that may change their size; this one may not.
    asked = variables.get("PET_NNODES", "1").rpartition(":")[2]
    if not asked.isdigit():
        raise ConfigError(f"PET_NNODES: {variables['PET_NNODES']!r} is no number of machines")
    nodes = int(asked)
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
    return ClusterEnvironment(nodes, node_rank == "0" if node_rank else _is_here(host, number), host, number)


def _is_here(host: str, port: int) -> bool:
    """Whether a name is this machine's: who talks to itself does so from the address that it talks to."""
    until = time.monotonic() + NAME_SECONDS
    while True:
        try:
            found = {str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
            return own_address(host, port) in found and any(interface(address) for address in found)
        except OSError as error:
            # An engine's names come up while its machines start.
            if time.monotonic() > until:
                raise PeerError(f"{host}: is no known name after {NAME_SECONDS} s ({error.strerror}); set PET_NODE_RANK") from None
            time.sleep(1)
