"""Reads params.yaml; what is wrong with it is told in one line."""

import json
import math
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from pipeline.config import Config, ConfigError, unknown
from pipeline.config.sections import LIST, WORD, Mix, Step

# Of a model, and no key of the file.
SOURCE = "source"


def load(path: Path, changes: dict[str, Any] | None = None) -> Config:
    """Read and check a params file, with other values for some keys; ConfigError says which key is wrong and what to write."""
    try:
        text = path.read_text(encoding="utf-8")
        values, keys = yaml.safe_load(text), _keys(yaml.compose(text))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; run from the project's folder, or name the file with --params") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # Without its snippets, which need lines of their own.
        said = " ".join(line.strip() for line in str(error).splitlines() if not line.startswith("    "))
        raise ConfigError(f"{path}: not YAML: " + said.replace('"<unicode string>", ', "").rstrip(":")) from None
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise ConfigError(f"{path}: {min(twice)}: stands twice; remove one of them")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected sections such as data: and train:, found {type(values).__name__}")
    for key, value in (changes or {}).items():
        section, _, name = key.rpartition(".")
        inner = values.setdefault(section, {}) if section else values
        if isinstance(inner, dict):
            inner[name] = value
    if isinstance(model := values.get("model"), dict) and SOURCE in model:
        raise ConfigError(f"{path}: model.{SOURCE}: is read from the file that model.name names; remove it")
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(_explain(one) for one in error.errors())) from None


def _keys(root: Any) -> list[str]:
    """The sections of a params file and their keys, each as often as it stands there: YAML would take the last."""
    sections = root.value if isinstance(root, yaml.MappingNode) else []
    inner = [(name, section.value) for name, section in sections if isinstance(section, yaml.MappingNode)]
    return [name.value for name, _ in sections] + [f"{name.value}.{key.value}" for name, keys in inner for key, _ in keys]


def _explain(error: Any) -> str:
    """One wrong key in one sentence: where, what stands there, what to write."""
    location = [str(part) for part in error["loc"] if part not in (LIST, WORD)]
    key = ".".join(location)
    value = error["input"]
    if error["type"] == "extra_forbidden":
        section: Any = Config
        for part in location[:-1]:
            section = section.model_fields[part].annotation
        known = [name for name, field in section.model_fields.items() if not field.exclude and name != SOURCE]
        return str(unknown(key, location[-1], known)).replace(f"{location[-1]!r} is unknown", "unknown key")
    if error["type"] == "value_error":
        return ".".join([*location, str(error["ctx"]["error"])])
    if isinstance(value, str) and error["type"] in ("float_type", "int_type"):
        return f"{key}: {value!r} is text, not a number{_as_number(value, error['type'])}"
    said = error["msg"].replace("Input should be", "must be").replace("a valid dictionary or instance of", "a section like")
    # As YAML has them.
    written = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    steps = ""
    if key == "data.augment" and isinstance(value, str):
        steps = f"; in a list: [{value}]" if value in (*get_args(Step), *get_args(Mix)) else ", or a list of steps such as [crop, flip]"
    return f"{key}: {written} is wrong; it {said[0].lower() + said[1:]}{steps}"


def _as_number(text: str, kind: str) -> str:
    """How to write a number that YAML took for text, such as 1e-3."""
    try:
        number = float(text)
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    return f"; write {int(number) if kind == 'int_type' or number.is_integer() else number}"
