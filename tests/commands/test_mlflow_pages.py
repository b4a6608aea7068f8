"""What people see of MLflow, in a real browser over a real server: the table, four runs beside each other, a run, the registered model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

import mlflow
import pytest
from mlflow.entities import Run

from tests.kit import browser
from tests.kit.experiment import Experiment
from tests.kit.servers import Server

pytestmark = [pytest.mark.slow, browser.needs_browser]
# So wide that the table has room for all columns: it draws those alone that are seen.
WIDE, TALL = 5000, 6000


class Pages:
    """Four finished runs, the last one evaluated, and the server that shows them."""

    def __init__(self, folder: Path):
        self.experiment = Experiment(folder).with_database()
        for seed in (1, 2):
            for rate in (0.05, 0.1):
                self.experiment.set(seed=seed, data__name="synthetic:600", model__name="mlp", train__learning_rate=rate)
                self.experiment.run("prepare")
                self.experiment.run("train")
        self.experiment.run("evaluate")
        self.server = Server(folder).start()
        client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
        (self.id,) = [one.experiment_id for one in client.search_experiments() if one.name == "lockstep"]
        self.runs: list[Run] = list(client.search_runs([self.id]))
        (self.evaluated,) = [one for one in self.runs if "test/accuracy" in one.data.metrics]

    def shown(self, path: str, *words: str, width: int = 1280, height: int = 900) -> str:
        """Return what a page holds once it has been drawn, with all these words in it."""
        url = f"{self.server.uri}/#/{path}{'&' if '?' in path else '?'}workflowType=machine_learning"
        return browser.content(url, *words, width=width, height=height)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    found = Pages(tmp_path_factory.mktemp("pages"))
    yield found
    found.server.kill()


def test_the_table_of_an_experiment_has_the_columns_that_matter(pages: Pages) -> None:
    metrics = ("best/validation_accuracy", "test/accuracy", "train/images_per_second", "total/hours", "Dataset")
    others = ("train.learning_rate", "seed", "lockstep.global_batch", "lockstep.world_size", "lockstep.outcome")
    names = [one.info.run_name or "" for one in pages.runs]
    accuracy = str(pages.evaluated.data.metrics["test/accuracy"])
    pages.shown(
        f"experiments/{pages.id}/runs?viewStateShareKey=lockstep",
        *(f">{one}<" for one in (*metrics, *others)),
        *names,
        accuracy,
        width=WIDE,
    )


def test_four_runs_are_compared_with_their_curves(pages: Pages) -> None:
    runs, experiments = (quote(json.dumps(ids)) for ids in ([one.info.run_id for one in pages.runs], [pages.id]))
    words = ("Comparing 4 Runs", "train.learning_rate", "seed", "best/validation_accuracy")
    pages.shown(f"compare-runs?runs={runs}&experiments={experiments}", *words)
    # Each of plotly's lines is a path of its own.
    lines = ["js-line"] * 4
    pages.shown(f"experiments/{pages.id}/runs?compareRunsMode=CHART", "train/loss", *lines, width=1800, height=TALL)


def test_the_page_of_a_run_begins_with_its_description_and_images(pages: Pages) -> None:
    run = pages.evaluated
    page = f"experiments/{pages.id}/runs/{run.info.run_id}"
    plots = {f"plots/{name}.png" for name in ("curves", "ranks", "confusion", "worst")}
    shown = pages.shown(page, run.data.tags["lockstep.weights_sha256"], *(f"path={one}" for one in plots))
    sources = re.findall(r'<img[^>]*src="(get-artifact[^"]*)"', shown.replace("&amp;", "&"))
    assert {re.findall("path=([^&]*)", source)[0] for source in sources} == plots
    for source in sources:
        with urlopen(f"{pages.server.uri}/{source}") as answer:
            assert answer.read(8) == b"\x89PNG\r\n\x1a\n"
    pages.shown(f"{page}/system-metrics", "system/cpu_utilization_percentage", "system/system_memory_usage_megabytes", "js-line")


def test_the_registered_model_is_shown_with_its_version(pages: Pages) -> None:
    clean = pages.experiment.json("models/receipt.json")["git"]["dirty"] is False
    aliases = mlflow.MlflowClient(pages.server.uri).get_registered_model("lockstep-synthetic").aliases
    assert aliases == ({"champion": "1"} if clean else {})
    pages.shown("models/lockstep-synthetic", ">Version 1<", "test/accuracy", *(f"{alias}</" for alias in aliases))
