"""The doctor looks whether the copy of runs can be read."""

import pytest

from pipeline.doctor.storage import copy
from tests.kit.compose import free_port
from tests.kit.storage import Storage


def test_a_copy_that_cannot_be_read_is_found_before_a_training_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_COPY", raising=False)
    assert copy() == []
    monkeypatch.setenv("LOCKSTEP_COPY", "nonsense")
    (found,) = copy()
    assert (found.kind, found.text) == ("wrong", "LOCKSTEP_COPY: 'nonsense' is not the address of a bucket; write s3://BUCKET/PREFIX")
    storage = Storage()
    for name, value in storage.variables().items():
        monkeypatch.setenv(name, value)
    assert [(one.kind, one.text) for one in copy()] == [("ok", "s3://runs/copies: the copy of runs can be read")]
    storage.kill()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    (found,) = copy()
    assert found.kind == "wrong"
    assert found.text.startswith("s3://runs/copies: cannot be read, and a start that finds no run here would end with 4: Could not connect")
