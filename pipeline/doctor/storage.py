"""A check that the copy of runs in object storage can be read."""

from pipeline.config import ConfigError, MachineError
from pipeline.doctor.finding import Finding
from pipeline.runs.object_storage import VARIABLE, Place, configured, one_line


def copy() -> list[Finding]:
    """Whether LOCKSTEP_COPY names a bucket that answers; nothing where it is not set."""
    try:
        where = configured()
        if where is None:
            return []
        with one_line("cannot be read, and a start that finds no run here would end with 4"):
            Place(*where, "no-run").read_list()
    except (ConfigError, MachineError) as error:
        return [Finding("wrong", str(error), f"see AWS_ENDPOINT_URL and the credentials, or unset {VARIABLE}")]
    return [Finding("ok", f"s3://{'/'.join(filter(None, where))}: the copy of runs can be read")]
