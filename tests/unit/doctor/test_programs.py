"""Checks of Docker Compose."""

import pytest

from pipeline.doctor import programs


@pytest.mark.docker
def test_compose_is_well_and_wrong_where_a_newer_one_is_needed() -> None:
    assert programs.compose().kind == "ok"
    found = programs.compose((99, 0))
    assert found.kind == "wrong"
    assert "is older than 99.0" in found.text
