"""The model of many ranks: it finds what it is made of, and counts messages and bytes as the reduction sends them."""

import numpy as np
import pytest

from bench import clients, scale


def test_costs_are_found_again_and_none_is_negative() -> None:
    costs = [0.02, 5e-5, 2e-9]
    exact = {str(n): {name: [float(np.dot(scale.shares_of(n, name), costs))] for name in scale.ALGORITHMS} for n in (2, 4, 6, 8)}
    assert scale.fit(exact) == pytest.approx(costs)
    # As if more ranks took less time.
    odd = {ranks: {name: [0.1 / int(ranks)] for name in times} for ranks, times in exact.items()}
    assert min(scale.fit(odd)) >= 0
    assert "| **6, not fitted** | flat |" in scale.tables(exact)["measured"]


@pytest.mark.parametrize(
    ("ranks", "algorithm", "messages", "tensors"), [(8, "flat", 14, 1.75), (8, "butterfly", 6, 1.75), (6, "butterfly", 6, 5 / 3)]
)
def test_messages_and_bytes_of_a_rank(ranks: int, algorithm: str, messages: int, tensors: float) -> None:
    groups = scale.sizes(ranks, ranks, algorithm)
    assert scale.messages(groups) == messages
    assert scale.sent(groups, 1.0) == pytest.approx(tensors)


def test_levels_are_worth_the_more_the_more_ranks_there_are() -> None:
    job, cluster = scale.JOBS[1], scale.Cluster()
    gains = [scale.reduction(job, n, "flat", cluster) / scale.reduction(job, n, "hierarchical", cluster) for n in (8, 64, 1024)]
    assert gains[0] == 1 < gains[1] < gains[2]
    steps = [scale.step(job, n, "butterfly", cluster) for n in (8, 1024)]
    assert job.step_seconds < steps[0] < steps[1]
    kept = [scale.kept(job, 1024, steps[1], cluster, elastic) for elastic in (True, False)]
    assert 1 > kept[0] > kept[1] > 0.9


@pytest.mark.slow
def test_a_store_is_asked_by_many() -> None:
    found = clients.measured(16, seconds=2)
    assert 0 < found["seconds to form a group"] < 30
    # Two looks a second at six names, of 16.
    assert 100 < found["operations a second"] < 250
    assert 0 < found["of a core"] < 1
