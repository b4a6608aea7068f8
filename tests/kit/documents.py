"""The documents, and what they promise: commands, listings, links and paths."""

import re
from pathlib import Path

from tests.kit.experiment import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md")] + sorted((ROOT / "docs").glob("*.md"))
# Its commands need images: tests/commands/test_your_images.py runs them.
OWN_IMAGES = ROOT / "docs" / "your-images.md"

_COMPOSE = "docker compose -f docker-compose.yml -f docker-compose"
# Commands that the tests of documents do not run as they stand: what they run instead, and why.
INSTEAD = {
    "make test": ("make --dry-run test", "these tests are part of it"),
    "make faults": ("PYTEST_ADDOPTS=--collect-only make faults", "half an hour; this fails where a required case has no test"),
    "make chaos SEED=1 N=100": ("make --dry-run chaos SEED=1 N=100", "an hour; tests/faults/test_chaos.py does four faults"),
    "make bench-gpu BENCH='--rehearse --out /tmp/rehearsal.json twice'": (
        "python bench/gpu.py --help",
        "a minute, and then nothing of a GPU",
    ),
    "dvc exp run -n fleet $(cat experiments/fleet)": (
        "dvc exp run -n fleet $(cat experiments/fleet) -S data.name=synthetic:600 -S train.epochs=1",
        "an hour",
    ),
    "dvc exp run --queue -S 'train.learning_rate=0.05,0.1' -S 'seed=1,2'": (
        "dvc exp run --queue -S 'train.learning_rate=0.05,0.1' -S 'seed=1,2' && dvc queue remove --queued",
        "tests/commands/test_pipeline.py runs a queue to its end",
    ),
    "dvc queue start --jobs 2": ("dvc queue start --help", "tests/commands/test_pipeline.py runs a queue to its end"),
    "python -m pipeline sweep train.learning_rate=0.02,0.05,0.1,0.2 --factor 2": (
        "python -m pipeline sweep --help",
        "tests/commands/test_sweep.py sweeps",
    ),
    "sbatch --nodes=2 deploy/slurm.sh": ("bash -n deploy/slurm.sh", "needs Slurm; tests/faults/test_slurm_jobs.py submits it"),
    "EXPERIMENTS=lines sbatch --array=1-3 --nodes=1 deploy/slurm.sh": (
        "bash -n deploy/slurm.sh",
        "needs Slurm; tests/faults/test_slurm_sites.py submits it",
    ),
    **dict.fromkeys(
        (
            "kubectl create configmap lockstep-params --from-file=params.yaml",
            "kubectl apply -f deploy/kubernetes/storage.yaml -f deploy/kubernetes/trainjob.yaml",
            "kubectl apply -f deploy/kubernetes/storage.yaml -f deploy/kubernetes/jobset.yaml",
        ),
        ("ls deploy/kubernetes/storage.yaml params.yaml", "needs Kubernetes; tests/containers/test_kubernetes.py runs the files' pods"),
    ),
    "ray job submit --working-dir deploy -- python ray_job.py --nodes 2 --gpus 8 --folder /shared/lockstep": (
        "python -m py_compile deploy/ray_job.py",
        "needs Ray; tests/engines/test_ray.py submits it",
    ),
    "sky jobs launch deploy/skypilot.yaml --env LOCKSTEP_COPY=s3://BUCKET/PREFIX": (
        "ls deploy/skypilot.yaml",
        "needs a cloud; tests/engines reads the file with SkyPilot",
    ),
    "dstack apply -f deploy/dstack.yml": ("ls deploy/dstack.yml", "needs dstack's server; tests/engines reads the file with dstack"),
    "mlflow server --backend-store-uri sqlite:///mlflow.db --artifacts-destination s3://BUCKET/mlflow": (
        "mlflow server --help",
        "runs until it is stopped; tests/commands/test_object_storage.py has such a server",
    ),
    "dvc remote add --default bucket s3://BUCKET/dvc": (
        "dvc remote add --default bucket s3://BUCKET/dvc && dvc remote remove bucket",
        "tests/commands/test_object_storage.py pushes to one",
    ),
    "dvc push": ("dvc push --help", "tests/commands/test_object_storage.py pushes"),
    "make bench": ("make bench BENCH='--pairs=1 --seconds=0.1 lenet'", "hours"),
    "python bench/faults.py": ("python bench/faults.py --help", "half an hour"),
    f"{_COMPOSE}.gpu.yml up": (f"{_COMPOSE}.gpu.yml config --quiet", "needs GPUs"),
    f"{_COMPOSE}.gpu.yml run --rm leader doctor": (f"{_COMPOSE}.gpu.yml config --quiet", "needs GPUs"),
    f"{_COMPOSE}.gpu-each.yml up": (f"{_COMPOSE}.gpu-each.yml config --quiet", "needs GPUs"),
    f"POSTGRES_PASSWORD=secret {_COMPOSE}.postgres.yml up --build": (
        f"{_COMPOSE}.postgres.yml config --quiet",
        "tests/containers/test_compose.py trains with it",
    ),
}
# Commands that stand in sentences and tables only, and who runs them.
ELSEWHERE = {
    "make lint": ".ci/run",
    "make ui IN=FOLDER": "`make ui`, in the README, with the folder that it has by itself",
    "make ui PORT=NUMBER": "`make ui`, in the README, with the port that it has by itself",
    "make test-fast": "tests/containers/test_other_system.py",
    "make test-all": ".ci/run, its two parts one after the other",
    "make test-hard": ".ci/run",
    "make test-systems": ".ci/run",
    "make pictures": "nobody: its pictures are looked at; tests/commands/test_mlflow_pages.py looks at the pages",
    "make golden": "nobody: it rewrites what the tests compare with",
    "make lock": "nobody: it needs a package index, and its answer changes by the day",
    "make audit": "nobody: it needs a service for vulnerabilities",
    "python -m tests.faults.elastic --seed 1 --events 500": "tests/faults/test_elastic_faults.py, with fewer events",
    "make mutate MODULE=config": "nobody: minutes; the mutants have tests in tests/unit/test_mutants.py",
    "make fuzz": "nobody: its examples are new each time",
    "make setup PYTHON=python3.12": "nobody: it needs another Python; tests/containers/test_other_system.py takes Python 3.13",
    "make engines": "`make test-engines`",
    "make test-engines": "nobody: ten minutes, and a gigabyte of engines; by hand, when a file for an engine changes",
    "dvc pull": "tests/commands/test_object_storage.py",
    "dvc remote modify bucket endpointurl URL": "tests/commands/test_object_storage.py",
    "docker compose start worker": "tests/containers/test_compose.py",
    "docker compose ps --all": "tests/containers/test_compose.py, as JSON",
    "docker compose up --detach --no-deps --scale worker=3 worker": "tests/containers/test_elastic_compose.py, with two",
    "docker kill": "tests/containers/test_compose.py",
    "python -m pipeline train --resume runs/…": "tests/faults/test_strategy_faults.py",
    "python bench/run.py PART…": "`make bench`, above",
    "python bench/run.py algorithms": "nobody: five minutes",
    "python bench/run.py lenet": "nobody: two minutes",
    "python bench/run.py strategies": "nobody: ten minutes",
    "python bench/run.py product": "nobody: half an hour",
    "python bench/run.py storage": "nobody: an hour",
    "python bench/run.py against": "nobody: two hours",
    "python bench/run.py --publish against --pairs 5": "nobody: two hours; tests/unit/test_bench_page.py looks at what it writes",
    "python bench/kernels.py": "nobody: some minutes",
    "python bench/kernels.py torchvision:mobilenet_v3_small --trainings 140": "nobody: its count changes from one time to the next",
    "MALLOC_PERTURB_=128 python -m tests.kit.uncomputed": "tests/unit/models/test_uncomputed.py",
    "python bench/run.py learning": "nobody: half an hour",
    "python bench/run.py images": "nobody: a quarter of an hour",
    "python bench/gpu.py PART…": "nobody: it needs a GPU; tests/ranks/test_gpu.py and others are what it runs",
    "make bench-gpu": "nobody: it needs a GPU",
    "python -m pipeline lead dvc repro": "tests/commands/test_lead.py, with a scheduler's variables",
    "python -m pipeline.launch.agent": "every training",
    "dvc plots diff": "tests/commands/test_pipeline.py",
    "dvc queue logs NAME": "nobody: it prints what a worker printed",
    "python -m pipeline train --stop-after-epochs N": "tests/commands/test_sweep.py",
    "python -m pipeline compare runs ../other/runs": "`python -m pipeline compare`, above; tests/commands/test_compare.py names folders",
}


def commands() -> list[str]:
    """Every line of every `sh` block of every page, once, in the order in which a reader meets them."""
    return list(dict.fromkeys(line for page in PAGES if page != OWN_IMAGES for line in blocks(page)))


def blocks(page: Path) -> list[str]:
    """The lines of a page's `sh` blocks."""
    found = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in found for line in block.splitlines() if line]


def runnable(command: str) -> str:
    """What a test runs for a command."""
    return INSTEAD.get(command, (command, ""))[0]


def needs_docker(command: str) -> bool:
    return "docker" in command or command == "make up" or "experiment/" in command or ".env" in command


def is_level(command: str) -> bool:
    """What tests/commands/test_levels.py runs."""
    return command.startswith("levels/run ")


def spans(page: Path) -> list[str]:
    """What stands between backticks outside of blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def listed_model() -> str:
    """The model that the README adds: the content of its file."""
    text = (ROOT / "README.md").read_text()
    (listing,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return listing
