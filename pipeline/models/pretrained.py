"""What a training begins with: the weights of a file, all but those of a head of another size; and modules that are frozen."""

import hashlib
import io
import logging
import struct
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from pipeline.config import ConfigError, DataError, unknown

log = logging.getLogger(__name__)

# How others wrap a model's weights in what they save; DataParallel and DDP put a prefix before every name.
WRAPPED_IN, PREFIX = ("state_dict", "model_state_dict", "model"), "module."
# The colour model within one that takes grey images.
INNER = "model."
# torchvision's auxiliary classifiers, which are never built here.
AUXILIARY = "aux"
# What torch's reader raises for what it did not write.
UNREADABLE = (
    SafetensorError,
    UnpicklingError,
    RuntimeError,
    ValueError,
    LookupError,
    EOFError,
    TypeError,
    AttributeError,
    AssertionError,
    struct.error,
)


def begin(model: nn.Module, file: Path, sha256: str, frozen: list[str]) -> None:
    """Give a model the weights in a file, and freeze these modules."""
    drawn = load_weights(model, file, sha256)
    freeze(model, frozen)
    if random := sorted(name for name, one in model.named_parameters() if name in drawn and not one.requires_grad):
        raise ConfigError(f"model.frozen: {random[0]} begins at random, as the file's has another size; leave its module out")


def load_weights(model: nn.Module, file: Path, sha256: str) -> set[str]:
    """Give a model the weights in a file; raises DataError unless it has this digest and is of such a model. Returns what stays drawn."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"model.weights: {file}: {error.strerror}; it must stay there while a training goes on") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(f"model.weights: {file} was changed while the training began; start again")
    given, own, head = _named_like(tensors(file, content), model), model.state_dict(), _head(model)
    reshaped = {name for name in own.keys() & given.keys() if given[name].shape != own[name].shape}
    of_head = {name for name in own if name.startswith(head)}
    # Another data set has another number of classes.
    is_resized = reshaped & of_head and all(given[name].shape[1:] == own[name].shape[1:] for name in reshaped & of_head)
    drawn = of_head if is_resized else set[str]()
    # An old file does not count batches.
    missing = {name for name in own.keys() - given.keys() - drawn if not name.endswith("num_batches_tracked")}
    too_many = {name for name in given.keys() - own.keys() if not name.removeprefix(INNER).lower().startswith(AUXILIARY)}
    for names, what in ((missing, "not in the file"), (too_many, "not in the model"), (reshaped - drawn, "of another shape there")):
        if names:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise DataError(f"model.weights: {file} is of another model: {min(names)}{more}: {what}; set model.name to that model")
    with torch.no_grad():
        for name in sorted(own.keys() & given.keys() - drawn):
            own[name].copy_(given[name])
            if not torch.isfinite(own[name]).all():
                raise DataError(f"model.weights: {file}: {name} is non-finite; take the weights of a training that has not diverged")
    if drawn:
        name = min(reshaped)
        shapes = f"{list(given[name].shape)} in the file and {list(own[name].shape)} here"
        log.warning("model.weights: %s begins at random, as %s is %s", head[:-1], name, shapes)
    return drawn


def tensors(file: Path, content: bytes) -> dict[str, Tensor]:
    """The state_dict in a file of safetensors or of torch.save; of the latter nothing but tensors is read."""
    try:
        if file.suffix == ".safetensors":
            found: Any = load_safetensors(content)
        else:
            # torchvision's references save their arguments too, which are values with names.
            with torch.serialization.safe_globals([Namespace]):
                found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except UNREADABLE:
        raise DataError(f"model.weights: {file} is damaged, or holds more than tensors; save a state_dict alone") from None
    for key in WRAPPED_IN:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if (
        not isinstance(found, Mapping)
        or not found
        or not all(isinstance(name, str) and isinstance(one, Tensor) for name, one in found.items())
    ):
        raise DataError(f"model.weights: {file} holds no state_dict, which has names and tensors alone")
    is_wrapped = all(name.startswith(PREFIX) for name in found)
    return {name.removeprefix(PREFIX) if is_wrapped else name: one for name, one in found.items()}


def _named_like(given: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The same under the names of a model that takes grey images, if only that one's names differ."""
    own = model.state_dict()
    is_inside = not own.keys() & given.keys() and any(INNER + name in own for name in given)
    return {INNER + name: one for name, one in given.items()} if is_inside else given


def _head(model: nn.Module) -> str:
    """What the names of the last layer's weights begin with."""
    return [name for name, one in model.named_modules() if next(one.parameters(recurse=False), None) is not None][-1] + "."


def freeze(model: nn.Module, names: list[str]) -> None:
    """Keep the weights of these modules as they are, and their BatchNorm's statistics, which they then use as in an evaluation."""
    modules = dict(model.named_modules())
    for name in names:
        module = modules.get(name, modules.get(INNER + name))
        if not name or module is None:
            raise unknown("model.frozen", name, [one for one in modules if "." not in one.removeprefix(INNER) and one])
        module.requires_grad_(False).eval()
    if names and not any(one.requires_grad for one in model.parameters()):
        raise ConfigError("model.frozen: nothing would be left to train; leave out the last layer")
