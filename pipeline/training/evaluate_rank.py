"""One rank of evaluate, started by torchrun: the published model on the test images."""

import json

from safetensors.torch import load
from torch import Tensor

from pipeline.data import store
from pipeline.data.batches import Pixels
from pipeline.files import atomic_write
from pipeline.job import Job
from pipeline.training import schedule
from pipeline.training.evaluation import Evaluation, Result
from pipeline.training.train_rank import joined, run_as_rank
from pipeline.training.work import build_model


def main(job: Job) -> None:
    """Evaluate the model on the test images and write the result."""
    manifest = store.read_manifest(job.prepared)
    with joined(job) as group:
        model = build_model(job, manifest, group.device)
        # Only the leader's machine has the file.
        model.load_state_dict(load(group.broadcast_bytes(group.on_rank_zero(lambda: weights(job), b""))))
        pixels = Pixels(manifest.mean, manifest.std, group.device)
        evaluation = Evaluation(store.open_split(job.prepared, "test"), pixels, manifest.num_classes, group)
        each: list[Tensor] = []
        result = evaluation(model, schedule.autocast_dtype(job.precision), each=each)
        assert result is not None
        predictions = evaluation.predictions(each)
        group.on_rank_zero(lambda: write(job, result, predictions), None)


def weights(job: Job) -> bytes:
    """Read the file of the model to evaluate."""
    assert job.weights is not None
    return job.weights.read_bytes()


def write(job: Job, result: Result, predictions: Tensor) -> None:
    """Write the result, which the stage reports."""
    values = {
        "accuracy": result.accuracy,
        "top5_accuracy": result.top5_accuracy,
        "loss": result.loss,
        "correct": result.correct,
        "total": result.total,
        "confusion": result.confusion.tolist(),
        "predictions": predictions.tolist(),
    }
    atomic_write(job.result, json.dumps(values).encode())


if __name__ == "__main__":
    run_as_rank(main)
