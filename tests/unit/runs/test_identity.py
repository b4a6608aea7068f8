"""The fingerprint: another one for all that can change a bit, and only for that."""

import hashlib
from pathlib import Path

import pytest

from pipeline.config import MachineError
from pipeline.hardware.placement import resolve
from pipeline.job import FirstWeights
from pipeline.runs import identity
from pipeline.runs.identity import fingerprint, flatten, run_identity, versions, write_identity
from pipeline.runs.source import source_digests
from tests.unit.hardware.test_placement import NO_GPU, OLD_CPU, ONE_GPU, TWO_GPUS, Machine, config

NATIVE = {"dist__reduction": "native", "dist__lanes": None}


def name(machine: Machine = NO_GPU, digest: str = "d", first: FirstWeights | None = None, **changes) -> str:
    return fingerprint(run_identity(config(**changes), resolve(config(**changes), machine), {"prepared data": digest}, first))


@pytest.mark.fault(22, "settings, data and device changed one at a time")
def test_the_fingerprint_follows_from_settings_data_and_device() -> None:
    here = name()
    assert name(dist__world_size=4, dist__batch_size_per_gpu=24) == here
    assert len({here, name(seed=2), name(OLD_CPU), name(TWO_GPUS), name(digest="e"), name(train__precision="fp32")}) == 6
    assert name(train__precision="bf16") == here
    assert name(tracking__log_every_steps=3) == here
    # Where the file lies does not matter.
    weights = [FirstWeights(file=Path(file), sha256=sha256) for file, sha256 in (("a", "1"), ("b", "1"), ("a", "2"))]
    assert name(first=weights[0], model__weights="a") == name(first=weights[1], model__weights="b")
    assert len({here, *(name(first=one, model__weights="a") for one in weights)}) == 3
    assert name(first=weights[0], model__weights="a", model__frozen=["conv1"]) != name(first=weights[0], model__weights="a")
    assert name(ONE_GPU, **NATIVE) != name(TWO_GPUS, **NATIVE)
    assert name(ONE_GPU) == name(TWO_GPUS)


def install(folder: Path, package: str) -> None:
    """Another version of a package, as far as its metadata go, before the installed one on the path."""
    found = folder / f"{package.replace('-', '_')}-0.0.1.dist-info"
    found.mkdir()
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.0.1\n")


@pytest.mark.fault(22, "versions changed one at a time")
@pytest.mark.parametrize(
    ("package", "on_cpu", "on_gpu", "native"),
    [
        ("torch", True, True, True),
        ("torchvision", True, True, True),
        ("numpy", True, True, True),
        ("nvidia-cudnn-cu13", False, True, True),
        ("nvidia-cublas", False, True, True),
        ("nvidia-cuda-nvrtc", False, True, True),
        ("triton", False, True, True),
        # It only moves bytes under `ordered`.
        ("nvidia-nccl-cu13", False, False, True),
        ("mlflow", False, False, False),
    ],
)
def test_another_version_of_what_computes_is_another_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, on_cpu: bool, on_gpu: bool, native: bool
) -> None:
    before = [name(), name(TWO_GPUS), name(TWO_GPUS, **NATIVE)]
    install(tmp_path, package)
    monkeypatch.syspath_prepend(str(tmp_path))
    after = [name(), name(TWO_GPUS), name(TWO_GPUS, **NATIVE)]
    assert [one != other for one, other in zip(before, after, strict=True)] == [on_cpu, on_gpu, native]


def test_how_nccl_adds_is_part_of_an_experiment_where_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [name(), name(TWO_GPUS), name(TWO_GPUS, **NATIVE)]
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert before[2] == name(TWO_GPUS, **NATIVE)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    after = [name(), name(TWO_GPUS), name(TWO_GPUS, **NATIVE)]
    assert [one != other for one, other in zip(before, after, strict=True)] == [False, False, True]


def test_versions_are_those_that_are_installed() -> None:
    import numpy
    import torch
    import torchvision

    found = versions(config(), "cuda", "nccl")
    # Its version of the build: 2.14.1+cu130.
    assert (found["torch"], found["numpy"]) == (torch.__version__.partition("+")[0], numpy.__version__)
    assert found["torchvision"] == torchvision.__version__.partition("+")[0]
    cudnn = torch.backends.cudnn.version()
    if cudnn is not None:
        major, minor, patch = (int(part) for part in found["nvidia-cudnn"].split(".")[:3])
        assert cudnn == 10000 * major + 100 * minor + patch


def test_an_identity_is_of_settings_data_versions_and_source() -> None:
    settings, placed = config(), resolve(config(), NO_GPU)
    parts = {"prepared data": "d", "versions": versions(settings, "cpu", "gloo"), "source": source_digests(settings)}
    assert (
        run_identity(settings, placed, {"prepared data": "d"}, None)
        == settings.identity(placed.device_kind, placed.precision, placed.backend) | parts
    )


def test_a_fingerprint_is_16_digits_of_the_identitys_digest() -> None:
    assert fingerprint({"seed": 1}) == hashlib.sha256(b'{"seed": 1}').hexdigest()[:16]


def test_nccl_is_asked_for_only_where_it_adds() -> None:
    native = config(**NATIVE)
    asked = {
        name: "nvidia-nccl" in versions(*one)
        for name, one in {
            "adds": (native, "cuda", "nccl"),
            "moves": (config(), "cuda", "nccl"),
            "gloo": (native, "cuda", "gloo"),
            "cpu": (native, "cpu", "nccl"),
        }.items()
    }
    assert asked == {"adds": True, "moves": False, "gloo": False, "cpu": False}


def test_a_package_without_the_cuda_in_its_name_is_found_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "ON_GPUS", ("nvidia-made-up",))
    with pytest.raises(MachineError, match=r"^nvidia-made-up: not installed as a package, so .*; run: make setup$"):
        versions(config(), "cuda", "nccl")
    install(tmp_path, "nvidia-made-up")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert versions(config(), "cuda", "nccl")["nvidia-made-up"] == "0.0.1"


def test_what_a_fingerprint_is_made_of_is_written_once(tmp_path: Path) -> None:
    write_identity(tmp_path, {"seed": 1, "data": {"name": "a"}})
    path = tmp_path / "identity.json"
    assert path.read_text() == '{\n  "seed": 1,\n  "data": {\n    "name": "a"\n  }\n}\n'
    write_identity(tmp_path, {"seed": 2})
    assert '"seed": 1' in path.read_text()


def test_nested_keys_are_joined_by_dots() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}, "e": None}) == {"a.b.c": 1, "a.d": [2], "e": None}
