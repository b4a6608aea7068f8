"""Object storage for tests: a real server of the S3 protocol, whose objects end with it."""

import subprocess
import sys
from typing import Any

import boto3

from tests.kit.compose import free_port
from tests.kit.experiment import clean_environment
from tests.kit.waiting import until

BUCKET = "runs"
KEYS = {
    "AWS_ACCESS_KEY_ID": "name",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Storage:
    """moto's server with one bucket; `uri` may be that of a proxy before it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        words = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(self.port)]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(words, env=clean_environment() | KEYS, **quiet)
        self.pid = self._process.pid
        self.client: Any = boto3.client(
            "s3", endpoint_url=self.uri, aws_access_key_id="name", aws_secret_access_key="secret", region_name="us-east-1"
        )
        until(self._answers, self._process, seconds=60, every_seconds=0.2)
        self.client.create_bucket(Bucket=BUCKET)

    def _answers(self) -> bool:
        from botocore.exceptions import BotoCoreError

        try:
            self.client.list_buckets()
        except BotoCoreError:
            return False
        return True

    def variables(self, uri: str | None = None) -> dict[str, str]:
        """What a process needs to use it, and to keep copies of runs there."""
        return KEYS | {"AWS_ENDPOINT_URL": uri or self.uri, "LOCKSTEP_COPY": f"s3://{BUCKET}/copies"}

    def names(self) -> set[str]:
        return {one["Key"] for one in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
