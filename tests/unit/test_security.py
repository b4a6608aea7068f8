"""Files from others (parameters, receipts, runs, archives) run no code and write nowhere else; credentials are in no file and no output."""

import base64
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
import tracemalloc
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np
import pytest
import torch

from pipeline import evaluate
from pipeline.__main__ import check_names
from pipeline.config import Config, ConfigError, DataError, MachineError
from pipeline.config.params import load
from pipeline.data import fashion_mnist, store
from pipeline.files import Paths, write_checksummed_json
from pipeline.tracking.journal import Journal
from pipeline.tracking.mirror_process import address
from pipeline.training.checkpoint import read_or_rebuild_index
from tests.kit.experiment import Experiment, settings

# In an address it is written as p%40ss%2Fs3cret, or by mistake as it is.
PASSWORD = "p@ss/s3cret"
BASIC = base64.b64encode(f"somebody:{PASSWORD}".encode()).decode()
OTHERS = {"MLFLOW_TRACKING_TOKEN": "t0ken-s3cret", "MLFLOW_TRACKING_PASSWORD": "0ther-s3cret", "AWS_SECRET_ACCESS_KEY": "4ws-s3cret"}


def touching(path: Path) -> str:
    """An expression that leaves a file behind when it is run."""
    return f"__import__('pathlib').Path('{path}').touch()"


class Payload(str):
    """What is run when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (str(self),)


def test_images_that_are_a_pickle_are_refused(tmp_path: Path) -> None:
    for kind in ("images", "labels"):
        np.save(tmp_path / f"train-{kind}.npy", np.array([Payload(touching(tmp_path / "ran"))], object), allow_pickle=True)
    with pytest.raises(ValueError, match="object"):
        store.open_split(tmp_path, "train")
    assert not (tmp_path / "ran").exists()


def test_a_params_file_cannot_run_code(tmp_path: Path) -> None:
    params = tmp_path / "params.yaml"
    params.write_text(f'seed: !!python/object/apply:builtins.eval ["{touching(tmp_path / "ran")}"]\n')
    with pytest.raises(ConfigError, match="not YAML"):
        load(params)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../elsewhere", "os", "pipeline.lead", "synthetic:../../elsewhere", "torchvision:../elsewhere", "/etc"])
@pytest.mark.parametrize("key", ["data__name", "model__name", "dist__strategy"])
def test_a_name_in_params_is_one_of_a_catalogue_and_never_a_path_or_a_module(key: str, name: str) -> None:
    with pytest.raises(ConfigError, match=key.replace("__", ".")):
        check_names(Config.model_validate(settings(**{key: name})), Path("params.yaml"))


@pytest.mark.parametrize("name", ["../../elsewhere", "/tmp/elsewhere", "", "0123456789ABCDEF", "0123456789abcdef\n", None, ["0" * 16]])
def test_a_receipt_that_names_no_run_is_refused(name: object, tmp_path: Path) -> None:
    paths = Paths(tmp_path / "here" / "params.yaml")
    paths.models.mkdir(parents=True)
    (paths.models / "model.safetensors").write_bytes(b"weights")
    epoch = {"epoch": 1, "step": 1, "train_loss": "0x1.0p-1", "validation_loss": "0x1.0p-1", "validation_accuracy": 0.5}
    values = {
        "fingerprint": name,
        "model_sha256": hashlib.sha256(b"weights").hexdigest(),
        "weights_sha256": "",
        "data_digest": "",
        "parameters": {},
        "precision": "fp32",
        "journal": "",
        "mlflow_run_id": None,
        "steps": 1,
        "best": epoch,
        "epochs": [epoch],
    }
    (paths.models / "receipt.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match=r"receipt.json: is damaged, or from another version of this code \(fingerprint\); "):
        evaluate.published(paths)
    (paths.models / "receipt.json").write_text(json.dumps(values | {"fingerprint": "0123456789abcdef"}))
    assert evaluate.published(paths).fingerprint == "0123456789abcdef"


@pytest.mark.parametrize("key", ["checkpoints", "best"])
def test_a_list_of_checkpoints_that_names_a_file_elsewhere_is_not_believed(key: str, tmp_path: Path) -> None:
    entry = {"step": 1, "file": "../precious", "sha256": ""}
    index = {"checkpoints": []} | {key: [entry] if key == "checkpoints" else entry}
    write_checksummed_json(tmp_path / "index.json", index)
    with pytest.raises(MachineError, match="no good checkpoint is left"):
        read_or_rebuild_index(tmp_path)


def evil_program(path: Path, ran: Path) -> None:
    """A `torch.export` program that runs code when it is loaded, and has no pickle that does."""
    program = torch.export.export(torch.nn.Flatten(), (torch.zeros(2, 1, 4, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.export.save(program, path)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in content.items():
            text = re.sub(rb'"expr_str": "[^"]+"', f'"expr_str": "{touching(ran)}"'.encode(), value)
            archive.writestr(name, text if name.endswith("models/model.json") else value)


def run_from_elsewhere(run: Path, *artifacts: str) -> None:
    journal = Journal(run / "journal.jsonl")
    elsewhere = {"experiment": "../../elsewhere", "artifacts": (run.parents[2] / "elsewhere").as_uri(), "name": "../elsewhere"}
    journal.event("run", id="0123456789abcdef", params={"seed": 1}, tags={}, **elsewhere)
    journal.event("started", stage="train", tags={})
    for name in artifacts:
        journal.event("artifact", path=name, folder=None)
    journal.event("model", path="model.pt2", shape=[1, 4, 4], num_classes=16)
    journal.event("ended", stage="train", outcome="done", cause="")
    journal.close()


@pytest.mark.slow
def test_a_run_from_elsewhere_is_mirrored_unopened_and_within_its_folder(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path / "here")
    good, bad, ran = experiment.folder / "runs" / "good", experiment.folder / "runs" / "bad", tmp_path / "ran"
    run_from_elsewhere(good)
    run_from_elsewhere(bad, "../../../precious")
    (tmp_path / "precious").write_text("precious")
    evil_program(good / "model.pt2", ran)
    experiment.set()
    outside = {path for path in tmp_path.rglob("*") if experiment.folder not in path.parents}
    said = experiment.run("sync", expect=4)
    assert "good: MLflow has all of it" in said
    assert "../../../precious is outside of the run's folder" in said
    assert {path for path in tmp_path.rglob("*") if experiment.folder not in path.parents} == outside
    (kept,) = (experiment.folder / "mlartifacts").rglob("*.pt2")
    assert kept.read_bytes() == (good / "model.pt2").read_bytes()
    # It would have run, so a test that nothing ran says something.
    with pytest.raises(AttributeError):
        torch.export.load(kept)
    assert ran.exists()


def package(folder: Path, *members: tuple[str, str | None]) -> None:
    """A Debian package whose members are files, or links to elsewhere."""

    def packed(*contents: tuple[str, str | None, bytes]) -> bytes:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name, link, content in contents:
                member = tarfile.TarInfo(name)
                member.size, member.type, member.linkname = len(content), tarfile.SYMTYPE if link else tarfile.REGTYPE, link or ""
                archive.addfile(member, io.BytesIO(content))
        return file.getvalue()

    about = packed(("./control", None, f"Package: {fashion_mnist.PACKAGE}\nVersion: 1\nArchitecture: all\n".encode()))
    parts = {"debian-binary": b"2.0\n", "control.tar": about, "data.tar": packed(*[(name, link, b"") for name, link in members])}
    with (folder / f"{fashion_mnist.PACKAGE}_1_all.deb").open("wb") as out:
        out.write(b"!<arch>\n")
        for name, content in parts.items():
            out.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{644:<8}{len(content):<10}`\n".encode() + content)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb here")
@pytest.mark.parametrize("way", ["dots", "root", "link"])
def test_a_package_is_unpacked_without_leaving_its_folder(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside, scratch, mirror = (tmp_path / name for name in ("outside", "scratch", "mirror"))
    for folder in (outside, scratch, mirror):
        folder.mkdir()
    ways = {"dots": [("./../../outside/dots", None)], "root": [(f"{outside}/root", None)]}
    package(mirror, *ways.get(way, [("./usr", str(outside)), ("./usr/link", None)]))
    (mirror / "apt-get").write_text(f"#!/bin/sh\ncp {mirror}/*.deb .\n")
    (mirror / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{mirror}:{os.environ['PATH']}")
    try:
        fashion_mnist._from_debian(scratch)
    except subprocess.CalledProcessError as error:
        assert b"tar" in error.stderr
    assert list(outside.iterdir()) == []


def test_a_small_file_that_unpacks_to_much_takes_no_more_memory_than_the_true_one(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb", compresslevel=1) as file:
        for _ in range(256):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(DataError, match="SHA-256"):
        fashion_mnist._decoded(tmp_path, "train-images-idx3-ubyte")
    assert tracemalloc.get_traced_memory()[1] < 128 << 20
    tracemalloc.stop()


class Refusal(BaseHTTPRequestHandler):
    """Lets nobody in, and remembers who asked."""

    asked: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        self.asked.add(self.headers["Authorization"])
        self.send_error(401)

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    """Where it listens, by name and password."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://somebody:{PASSWORD}@127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_credentials_reach_the_server_and_nothing_else(server: str, experiment: Experiment) -> None:
    encoded = server.replace(PASSWORD, quote(PASSWORD, safe=""))
    said = experiment.set(model__name="mlp", train__epochs=1).run("prepare", MLFLOW_TRACKING_URI=server, **OTHERS)
    said += experiment.run("train", MLFLOW_TRACKING_URI=encoded, **OTHERS)
    assert "MLflow does not have all of it yet" in said
    said += experiment.run("sync", expect=4, MLFLOW_TRACKING_URI=server, **OTHERS)
    assert Refusal.asked == {f"Basic {BASIC}"}
    said += experiment.run("doctor", expect=4, MLFLOW_TRACKING_URI=server, **OTHERS)
    said += experiment.run("evaluate", MLFLOW_TRACKING_URI=f"{encoded.rpartition(':')[0]}:9", **OTHERS)
    written = {path: path.read_bytes() for path in experiment.folder.rglob("*") if path.is_file()}
    assert {"mirror.log", "mirror.json", "torchrun.log", "job.json", "stderr.log", "journal.jsonl"} <= {path.name for path in written}
    for secret in ("somebody", PASSWORD, quote(PASSWORD, safe=""), BASIC, *OTHERS.values()):
        assert secret not in said
        assert not [path for path, content in written.items() if secret.encode() in content]


def test_the_address_of_a_run_has_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://somebody:{PASSWORD}@host:5000/at")
    assert address(tmp_path, Paths(tmp_path / "params.yaml")).startswith("http://host:5000/at/#/experiments/")
