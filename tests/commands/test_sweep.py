"""Successive halving for real: rungs are stops, and the winner has the bits of a training that nothing interrupted."""

import shlex
import shutil
import signal
from hashlib import sha256
from pathlib import Path

import pytest
from dvc.utils.cli_parse import to_path_overrides
from dvc.utils.hydra import apply_overrides

from pipeline.config import Config, ConfigError
from pipeline.config.params import load
from pipeline.files import Paths, write_checksummed_json
from pipeline.sweep import Candidate, candidates_of, report, rungs, values_of
from pipeline.tracking.journal import Journal
from tests.kit.experiment import ROOT, Experiment
from tests.kit.trainings import mlflow_runs
from tests.kit.waiting import until

RATES = "train.learning_rate=0.0001,0.01,0.05,0.1"
SETTINGS = {"model__name": "mlp", "train__epochs": 4}


@pytest.mark.parametrize(
    ("count", "epochs", "factor", "expected"),
    [
        (8, 8, 2, [(1, 4), (2, 2), (4, 1)]),
        (8, 10, 2, [(2, 4), (3, 2), (5, 1)]),
        (9, 27, 3, [(3, 3), (9, 1)]),
        (7, 16, 4, [(1, 2), (4, 1)]),
        # Too few epochs for all rungs, or for any.
        (8, 2, 2, [(1, 1)]),
        (5, 1, 2, [(1, 1)]),
    ],
)
def test_each_rung_is_shorter_and_keeps_fewer(count: int, epochs: int, factor: int, expected: list[tuple[int, int]]) -> None:
    assert rungs(count, epochs, factor) == expected


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["train.learning_rate"], "expected KEY=VALUE,VALUE such as train.learning_rate=0.01,0.1"),
        (["train.learning_rate=0.1"], "train.learning_rate=0.1: is one candidate; name two or more values"),
        (["train.learning_rate=0.1,0.10"], "train.learning_rate=0.1 and train.learning_rate=0.10 are the same experiment"),
        (["dist.world_size=1,2"], "batch_size_per_gpu"),
        (["train.learning_rte=0.1,0.2"], "train.learning_rte: unknown key; did you mean learning_rate?"),
        (["train.learning_rate=0.1,fast"], "train.learning_rate: 'fast' is text, not a number"),
        (["train.learning_rate=0.1,0.1,0.2"], "train.learning_rate=0.1 and train.learning_rate=0.1 are the same experiment"),
        (["train.learning_rate=0.1,0.2", "train.learning_rate=0.3,0.4"], "train.learning_rate is named twice"),
        (["train.momentum={,0.1"], "train.momentum={,0.1: is not YAML"),
        (["model.name=mlp,lenett"], "model.name: 'lenett' is unknown; did you mean lenet?"),
        (["dist.strategy=ddp,foo"], "dist.strategy: 'foo' is unknown"),
        (["seed=1,2"], "seed: candidates are compared on the same data and as many epochs; sweep another key"),
    ],
)
def test_what_cannot_be_swept_is_one_line_before_anything_is_trained(tmp_path: Path, values: list[str], said: str) -> None:
    experiment = Experiment(tmp_path).set(**SETTINGS)
    experiment.run("prepare")
    if values == ["dist.world_size=1,2"]:
        # Another world size is the same experiment, with a batch that says so.
        experiment.set(**SETTINGS, dist__batch_size_per_gpu=None, dist__global_batch=96)
        said = "dist.world_size=1 and dist.world_size=2 are the same experiment"
    with pytest.raises(ConfigError) as error:
        candidates_of(values, Paths(experiment.params))
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_values_are_combined(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path).set(**SETTINGS)
    experiment.run("prepare")
    found = candidates_of(["train.learning_rate=0.1,0.2", "train.clip_norm=null,1.0"], Paths(experiment.params))
    assert [candidate.name for candidate in found] == [
        "train.learning_rate=0.1 train.clip_norm=null",
        "train.learning_rate=0.1 train.clip_norm=1.0",
        "train.learning_rate=0.2 train.clip_norm=null",
        "train.learning_rate=0.2 train.clip_norm=1.0",
    ]
    assert [one.config.train.clip_norm for one in found] == [None, 1.0, None, 1.0]
    lists = values_of("dist.lanes_per_rank", "[2,2],[1,3]")
    assert lists == [("[2, 2]", [2, 2]), ("[1, 3]", [1, 3])]


def test_the_last_line_makes_the_winner_the_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = Experiment(tmp_path).set(**SETTINGS)
    experiment.run("prepare")
    paths = Paths(experiment.params)
    found = candidates_of(["train.learning_rate=0.1, 0.2", "train.clip_norm=null , 1.0"], paths)
    assert found[3].pairs == ["train.learning_rate=0.2", "train.clip_norm=1.0"]
    lists = [f"model.frozen={text}" for text, _ in values_of("model.frozen", "[conv1], [conv1,bn1]")]
    winner = Candidate([*found[3].pairs, lists[1], "model.weights=my weights.pt"], found[3].config, found[3].plan)
    report(found, winner, {winner.name: ["0.5"]})
    command = capsys.readouterr().err.splitlines()[-1].partition("to make it the experiment: ")[2]
    assert command.startswith("dvc exp run -S train.learning_rate=0.2 -S train.clip_norm=1.0 -S 'model.frozen=[")
    words = shlex.split(command)
    assert words[3::2] == ["-S"] * 4
    # As DVC takes them.
    ((file, overrides),) = to_path_overrides(words[4::2]).items()
    shutil.copy(ROOT / file, tmp_path / "all-keys.yaml")
    apply_overrides(tmp_path / "all-keys.yaml", overrides)
    config = load(tmp_path / "all-keys.yaml")
    assert (config.train.learning_rate, config.train.clip_norm) == (0.2, 1.0)
    assert (config.model.frozen, config.model.weights) == (["conv1", "bn1"], "my weights.pt")


def test_a_rung_is_reached_with_its_validation_and_what_comes_later_changes_no_decision(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path).set(**SETTINGS)
    experiment.run("prepare")
    found, _ = candidates_of(["train.learning_rate=0.1,0.2"], Paths(experiment.params))
    run, first = found.plan.job.run, found.plan.steps_per_epoch
    (run / "checkpoints").mkdir(parents=True)
    journal = Journal(run / "journal.jsonl")
    journal.event("started", stage="train", tags={})
    (run / "checkpoints" / f"step-{first:08d}.safetensors").write_bytes(b"")
    write_checksummed_json(
        run / "checkpoints" / "index.json",
        {"checkpoints": [{"step": first, "file": f"step-{first:08d}.safetensors", "sha256": sha256(b"").hexdigest()}]},
    )
    # A stop has cut off the validation there.
    assert (found.at(1), found.accuracy(1)) == (False, -1.0)
    journal.metrics({"validation/accuracy": 0.5}, first)
    assert (found.at(1), found.accuracy(1)) == (True, 0.5)
    journal.event("ended", stage="train", outcome="diverged", cause="")
    journal.close()
    assert (found.at(1), found.accuracy(1), found.diverged) == (True, 0.5, True)
    assert (found.at(2), found.accuracy(2)) == (False, -1.0)


@pytest.mark.slow
def test_the_winner_has_the_bits_of_its_own_training_and_a_stop_changes_nothing(experiment: Experiment, tmp_path: Path) -> None:
    experiment.set(**SETTINGS).run("prepare")
    paths = Paths(experiment.params)
    candidates = candidates_of([RATES], paths)

    def stopped_at(candidate: Candidate, epoch: int) -> bool:
        return candidate.at(epoch) and not candidate.plan.done

    # An MLflow that does not answer until the sweep is stopped has all candidates in the end.
    process = experiment.start("sweep", RATES, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    until(lambda: stopped_at(candidates[1], 1), process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode in (75, 130), said
    assert "does not answer" in said
    assert not candidates[3].at(1)
    said = experiment.run("sweep", RATES)
    # The first two have come to their first rung, and are not started for it again.
    assert said.count("sweep: train.learning_rate=0.0001\n") == 0
    lines = [line.removeprefix("sweep: ").split() for line in said.splitlines() if line.startswith("sweep: train.learning_rate=0")]
    figures = {words[0]: words[1:] for words in lines if len(words) > 1 and words[1][0].isdigit()}
    assert [len(figures[candidate.name]) for candidate in candidates].count(1) == 2
    (winner,) = [candidate for candidate in candidates if candidate.plan.done]
    assert f"{winner.name} won" in said
    assert "where all candidates to the end are 176" in said
    # 11 steps an epoch: four candidates for one, two for one more, one for two more.
    assert "88 steps were trained" in said
    assert winner.accuracy(4) == max(candidate.accuracy(4) for candidate in candidates)
    recorded = mlflow_runs(experiment)
    assert len(recorded) == 4
    assert all("validation/accuracy" in one.data.metrics and one.info.status != "RUNNING" for one in recorded)
    receipt = experiment.json("models/receipt.json")
    assert receipt["fingerprint"] == winner.plan.job.run.name
    alone = Experiment(tmp_path / "alone")
    alone.folder.mkdir()
    alone.set(**SETTINGS, train__learning_rate=winner.config.train.learning_rate).with_database().run("prepare")
    alone.run("train")
    assert alone.json("models/receipt.json")["weights_sha256"] == receipt["weights_sha256"]


@pytest.mark.slow
def test_a_training_stops_behind_an_epoch_and_goes_on(experiment: Experiment) -> None:
    experiment.set(**SETTINGS).run("prepare")
    said = experiment.run("train", "--stop-after-epochs", "1", expect=75)
    assert "stopped at step 11, as asked" in said
    assert "stopped behind epoch 1 already" in experiment.run("train", "--stop-after-epochs", "1", expect=75)
    assert experiment.json(f"runs/{experiment.run_folder.name}/status.json")["outcome"] == "stopped"
    assert not (experiment.folder / "models").exists()
    # More epochs than there are is no stop.
    experiment.run("train", "--stop-after-epochs", "9")
    assert experiment.json("models/receipt.json")["steps"] == 44
    assert isinstance(Config.model_validate(experiment.json("models/receipt.json")["parameters"]), Config)
