"""Checks of the engine above this machine: its name, this machine's place, how long it waits before SIGKILL, GPUs bound to tasks."""

from collections.abc import Mapping

from pipeline.cluster.environment import detect
from pipeline.config import Config, ConfigError, PeerError
from pipeline.doctor.finding import Finding
from pipeline.hardware.machine import Machine

# A variable of each, the seconds between its stop request and SIGKILL where nobody says otherwise, and how to say otherwise.
ENGINES = {
    "SkyPilot": ("SKYPILOT_TASK_ID", 30, "it cannot be told otherwise"),
    "dstack": ("DSTACK_RUN_ID", 10, "it cannot be told otherwise"),
    "Ray": ("RAY_JOB_ID", 3, "RAY_JOB_STOP_WAIT_TIME_S in the job's env_vars"),
    "Slurm": ("SLURM_JOB_ID", 30, "--signal=TERM@180, and GraceTime of the partition"),
    "Kubernetes": ("KUBERNETES_SERVICE_HOST", 30, "terminationGracePeriodSeconds of the pod"),
}


def place(config: Config, variables: Mapping[str, str]) -> list[Finding]:
    """Which engine this is, where this machine stands in its job, and whether a save fits into its grace."""
    name, (_, seconds, longer) = next(((name, facts) for name, facts in ENGINES.items() if facts[0] in variables), ("", ("", 0, "")))
    try:
        found = detect(config, variables)
    except (ConfigError, PeerError) as error:
        return [Finding("wrong", str(error))]
    where = "one machine" if found is None else f"{found.nodes} machines, the leader's at {found.host}:{found.port}"
    own = "" if found is None else ", this one leads" if found.leads else ", this one joins it"
    findings = [Finding("ok", f"{name or 'no engine'}: {where}{own}")]
    grace = config.dist.grace_seconds
    if name and seconds < grace:
        after = "scancel" if name == "Slurm" else "its stop request"
        text = f"{name} may kill {seconds} s after {after}, and dist.grace_seconds is {grace}; only the newest checkpoint is sure"
        findings.append(Finding("note", text, longer))
    return findings


def bound_gpus(ranks: int, machine: Machine, variables: Mapping[str, str]) -> list[Finding]:
    """Whether Slurm gives its one task here fewer GPUs than it has ranks."""
    binding = next((name for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU") if variables.get(name)), None)
    if binding is None or not 0 < len(machine.gpus) < ranks:
        return []
    text = f"{binding}={variables[binding]}: this task sees {len(machine.gpus)} GPU(s), for {ranks} ranks"
    return [Finding("wrong", text, f"--ntasks-per-node=1 --gpus-per-node={ranks}, without --gpus-per-task and --gpu-bind")]
