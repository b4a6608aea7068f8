"""A run's model as a version of a registered one, and the alias of the best of them."""

import re
from typing import Any

CHAMPION = "champion"
DESCRIPTION = "Versions are evaluated runs. The champion has the best test accuracy of those of committed code on its test images."
# Of a version of a registered model: on which test images it was measured.
ACCURACY_TAG, TESTS_TAG, CLEAN_TAG = "test/accuracy", "lockstep.tests", "lockstep.clean"


def register(client: Any, run_id: str, model: Any, evaluated: dict[str, Any]) -> str:
    """Make a logged model a version of a registered one, and return name/version; the champion is the best of those of committed code."""
    from mlflow import MlflowException

    # MLflow takes no / and : in such names, and its searches no quotes.
    name = re.sub(r"[/:'\"`]", "-", f"{client.get_experiment(model.experiment_id).name}-{evaluated['model']}")
    try:
        client.create_registered_model(name, description=DESCRIPTION)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
    version = versions[0] if versions else client.create_model_version(name, f"models:/{model.model_id}", run_id, model_id=model.model_id)
    facts = {ACCURACY_TAG: evaluated["accuracy"], TESTS_TAG: evaluated["tests"], CLEAN_TAG: evaluated["clean"]}
    for tag, value in facts.items():
        client.set_model_version_tag(name, version.version, tag, str(value))
    if evaluated["clean"] and _beats_champion(client, name, evaluated):
        # Of all versions: another evaluation may end at the same time.
        client.set_registered_model_alias(name, CHAMPION, _best(client, name, evaluated["tests"]).version)
    return f"{name}/{version.version}"


def _best(client: Any, name: str, tests: str) -> Any:
    """Return the best version of committed code on these test images, of equals the first."""
    found = [one for one in client.search_model_versions(f"name = '{name}'") if one.tags.get(TESTS_TAG) == tests]
    clean = [one for one in found if one.tags.get(CLEAN_TAG) == "True"]
    return max(clean, key=lambda one: (float(one.tags[ACCURACY_TAG]), -int(one.version)))


def _beats_champion(client: Any, name: str, evaluated: dict[str, Any]) -> bool:
    """Return True if there is no champion, or one that did worse on the same test images."""
    champion = client.get_registered_model(name).aliases.get(CHAMPION)
    if champion is None:
        return True
    tags = client.get_model_version(name, champion).tags
    return tags.get(TESTS_TAG) == evaluated["tests"] and float(tags.get(ACCURACY_TAG, "inf")) < evaluated["accuracy"]
