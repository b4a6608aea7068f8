"""What the variables of an engine make of a machine: of each those that it really sets, and the traps in them."""

from typing import Any

import pytest

from pipeline.cluster.environment import detect, first_host
from pipeline.config import Config, ConfigError
from tests.kit.experiment import settings


def config(**changes: Any) -> Config:
    return Config.model_validate(settings(**changes))


def test_the_place_in_a_job_is_read_from_pet_variables_and_what_is_missing_is_named() -> None:
    assert detect(config(), {}) is None
    assert detect(config(), {"PET_NNODES": "1:1"}) is None
    named = {"PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": "job-0:29500", "PET_NODE_RANK": "1"}
    found = detect(config(), named)
    assert found is not None
    assert (found.nodes, found.leads, found.host, found.port) == (2, False, "job-0", 29500)
    here = detect(config(), {"PET_NNODES": "2", "PET_MASTER_ADDR": "localhost"})
    assert here is not None
    assert (here.leads, here.port) == (True, 29500)
    for address in ({"PET_MASTER_ADDR": "fd00::5", "PET_MASTER_PORT": "29501"}, {"PET_RDZV_ENDPOINT": "[fd00::5]:29501"}):
        far = detect(config(), {"PET_NNODES": "2", "PET_NODE_RANK": "1"} | address)
        assert far is not None
        assert (far.host, far.port) == ("fd00::5", 29501)
    with pytest.raises(ConfigError, match="set world_size: 8"):
        detect(config(), named | {"PET_NPROC_PER_NODE": "4"})
    with pytest.raises(ConfigError, match="says where they meet"):
        detect(config(), {"PET_NNODES": "2"})
    for wrong in ("two", "3:2", "1:", "-1"):
        with pytest.raises(ConfigError, match=f"^PET_NNODES: '{wrong}' is no number of machines, nor a range such as 1:4"):
            detect(config(), {"PET_NNODES": wrong})


def test_a_range_of_machines_is_one_number_unless_the_world_size_comes_from_who_is_there() -> None:
    named = {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "job-0:29500", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "8"}
    auto = config(dist__world_size="auto", dist__batch_size_per_gpu=None, dist__global_batch=96)
    found = [detect(auto, named), detect(auto, named | {"PET_NNODES": "2"}), detect(config(), named | {"PET_NPROC_PER_NODE": ""})]
    assert [(one.least, one.nodes) for one in found if one is not None] == [(1, 4), (2, 2), (4, 4)]


# As `srun --nodes=2 --ntasks-per-node=1 env` prints them on the second machine, within a batch job of four.
SLURM_STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu-[003,007]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
}
# What the batch shell of the same job has: by them it would be the first machine of four.
SLURM_BATCH = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "4", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9",
    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
    "SKYPILOT_TASK_ID": "sky-2026-11-24-lockstep",
}
DSTACK = {
    "DSTACK_NODES_NUM": "2",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_MASTER_NODE_IP": "10.0.0.4",
    "DSTACK_GPUS_PER_NODE": "1",
    "DSTACK_RUN_ID": "lockstep-1",
}
ENGINES = {
    "Slurm": (SLURM_STEP, "SLURM_NODEID", "gpu-003", 24711),
    "SkyPilot": (SKYPILOT, "SKYPILOT_NODE_RANK", "10.0.0.4", 29500),
    "dstack": (DSTACK, "DSTACK_NODE_RANK", "10.0.0.4", 29500),
}


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_says_where_this_machine_stands(name: str) -> None:
    variables, rank, host, port = ENGINES[name]
    found = detect(config(), variables)
    assert found is not None
    assert (found.nodes, found.leads, found.host, found.port, found.engine) == (2, False, host, port, name)
    first = detect(config(), variables | {rank: "0"})
    assert first is not None and first.leads
    # One machine needs no leader.
    assert detect(config(), {key: value for key, value in variables.items() if "NUM" not in key}) is None
    # What a person has set goes before it, each by itself: names that do not resolve, or a port that is taken.
    moved = detect(config(), variables | {"PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "21000"})
    assert moved is not None
    assert (moved.nodes, moved.leads, moved.host, moved.port) == (2, False, "head", 21000)


def test_a_batch_shell_of_slurm_is_one_machine_and_steps_of_one_have_ports_of_their_own() -> None:
    assert detect(config(), SLURM_BATCH) is None
    assert detect(config(), SLURM_STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}) is None
    found = [detect(config(), SLURM_STEP | {"SLURM_STEP_ID": step}) for step in ("0", "1")]
    assert [one.port for one in found if one is not None] == [24711, 24712]


def test_an_engine_within_another_is_the_one_that_started_this_process() -> None:
    found = detect(config(), SLURM_STEP | SKYPILOT)
    assert found is not None
    assert (found.engine, found.host) == ("SkyPilot", "10.0.0.4")


def test_a_rank_that_a_shell_expanded_too_early_and_a_task_for_every_gpu_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^PET_NODE_RANK: 0 on machine 1 of 2, as SLURM_NODEID says: it was expanded too early; leave it"
    ):
        detect(config(), SLURM_STEP | {"PET_NODE_RANK": "0"})
    # A machine of a job whose machines are steps of their own, as TorchX starts them.
    alone = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
    found = detect(config(), SLURM_STEP | alone | {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "n1"})
    assert found is not None and (found.nodes, found.leads) == (2, False)
    with pytest.raises(ConfigError, match="8 tasks on 1 machine; one a machine"):
        detect(config(), SLURM_STEP | alone | {"SLURM_STEP_NUM_TASKS": "8"})
    with pytest.raises(ConfigError, match=r"^SLURM_STEP_NUM_TASKS: 16 tasks on 2 machines; .* srun --ntasks-per-node=1$"):
        detect(config(), SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "16"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n[1-3,5]", "n1"),
        ("n[001-128]-ib,m[1-2]", "n001-ib"),
        ("a1,b2", "a1"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("gpu-7", "gpu-7"),
        ("10.0.0.4\n10.0.0.9", "10.0.0.4"),
        ("", ""),
    ],
)
def test_the_first_host_is_found_without_scontrol(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
