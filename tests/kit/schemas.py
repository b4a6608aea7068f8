"""Strict JSON schemas of kinds of Kubernetes, in kubernetes.json.gz: those of the CRDs, where an unknown key is an error.

Made by `python -m tests.kit.schemas TRAINJOBS.yaml TRAININGRUNTIMES.yaml JOBSETS.yaml`, from the CRDs of kubeflow/trainer at 8c0f5059b
(manifests/base/crds) and of kubernetes-sigs/jobset at 08dfbdfd (config/components/crd/bases), both under the Apache licence 2.0.
"""

import gzip
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("kubernetes.json.gz")


@cache
def _all() -> dict[str, Any]:
    return json.loads(gzip.decompress(FILE.read_bytes()))


def schema(kind: str) -> dict[str, Any]:
    """The schema of a kind; a Job's is that of the template which a JobSet makes Jobs of."""
    if kind != "Job":
        return _all()[kind]
    jobs = _all()["JobSet"]["properties"]["spec"]["properties"]["replicatedJobs"]["items"]["properties"]["template"]
    words = {"apiVersion": {"const": "batch/v1"}, "kind": {"const": "Job"}, "metadata": {"type": "object"}}
    return jobs | {"properties": jobs["properties"] | words}


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A CRD's schema without its texts, closed to unknown keys."""
    found = {
        key: value for key, value in schema.items() if key in ("type", "enum", "required", "minimum", "maximum", "pattern", "maxItems")
    }
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "properties" in schema:
        found |= {"properties": {key: strict(value) for key, value in schema["properties"].items()}, "additionalProperties": False}
    elif isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = strict(schema["additionalProperties"])
    if "items" in schema:
        found["items"] = strict(schema["items"])
    return found


def main(paths: list[str]) -> None:
    crds = [yaml.safe_load(Path(path).read_text())["spec"] for path in paths]
    found = {one["names"]["kind"]: strict(one["versions"][-1]["schema"]["openAPIV3Schema"]) for one in crds}
    FILE.write_bytes(gzip.compress(json.dumps(found, sort_keys=True).encode(), 9, mtime=0))


if __name__ == "__main__":
    main(sys.argv[1:])
