"""Checks that MLflow's store takes what a run sends.

A server is asked with `requests`, as MLflow's own client does, so proxies, certificates and ~/.netrc work alike. Importing that client
takes 1.5 s on an idle machine and longer on a busy one, so a child process that used it could not be told from a server that is silent.
"""

import base64
import json
import os
import shlex
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.doctor.finding import Finding
from pipeline.tracking.mirror_process import without_credentials
from pipeline.tracking.mirror_state import error_line

# To connect, and then to answer: both together leave the doctor in time.
ANSWER_SECONDS = 1.6
LATER = "docker compose up -d mlflow, or start it elsewhere; training does not wait for it: python -m pipeline sync afterwards"
SEARCH = "/api/2.0/mlflow/experiments/search?max_results=1"


def store(uri: str) -> Finding:
    """Whether MLflow's store can be written; the text names no credential."""
    scheme = uri.partition(":")[0].lower() if ":" in uri else ""
    if scheme in ("http", "https"):
        return _server(uri)
    if scheme == "sqlite":
        return _database(Path(uri.removeprefix("sqlite:///").partition("?")[0]))
    if scheme in ("", "file") and not _is_set("MLFLOW_ALLOW_FILE_STORE"):
        return Finding("wrong", "MLflow no longer takes a plain folder as its store (MLFLOW_TRACKING_URI)", "unset MLFLOW_TRACKING_URI")
    return Finding("note", f"MLflow's store is at {scheme or 'a folder'}:, which the doctor does not check")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("true", "1")


def _database(path: Path) -> Finding:
    """Whether this user can write MLflow's SQLite file."""
    folder = shlex.quote(str(path.parent))
    if not path.parent.is_dir():
        return Finding("wrong", f"MLflow's database needs the folder {path.parent}", f"mkdir -p {folder}")
    for one in (path.parent, path):
        if one.exists() and not os.access(one, os.W_OK, effective_ids=True):
            fix = f"sudo chown {os.geteuid()}:{os.getegid()} {shlex.quote(str(one))}"
            return Finding("wrong", f"MLflow's database {path} cannot be written as uid {os.geteuid()}", fix)
    return Finding("ok", f"MLflow's database {path} can be written")


def _server(uri: str) -> Finding:
    """Whether a server lets this machine search its experiments."""
    import requests

    try:
        server, credentials = without_credentials(uri)
        parts = urlsplit(server)
        host, port = parts.hostname, parts.port
        if not host or "@" in "".join(urlsplit(uri)[2:]):
            raise ValueError("a password with a slash, or no host")
    except ValueError:
        fix = "percent-encode its name and password, as in MLFLOW_TRACKING_URI=http://me:p%40ss@host:5000"
        return Finding("wrong", "MLFLOW_TRACKING_URI is not a valid address", fix)
    host = f"[{host}]" if ":" in host else host
    # The Host header as the client sends it: without the scheme's own port.
    if port and (parts.scheme, port) not in (("http", 80), ("https", 443)):
        host = f"{host}:{port}"
    address = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
    try:
        status, body = _get(f"{address}{SEARCH}", os.environ | credentials)
    except requests.exceptions.SSLError as error:
        fix = "export MLFLOW_TRACKING_SERVER_CERT_PATH=ITS-AUTHORITY.pem"
        return Finding("wrong", f"no secure connection to MLflow at {address} ({error_line(error)})", fix)
    except requests.RequestException as error:
        return Finding("wrong", f"MLflow cannot be reached at {address} ({error_line(error)})", LATER)
    return _finding_of(address, host, status, body)


def _get(url: str, variables: dict[str, str]) -> tuple[int, bytes]:
    """Return the status and the first MiB of the answer; certificates and credentials as MLflow's client takes them from variables."""
    import requests
    from urllib3 import disable_warnings
    from urllib3.exceptions import InsecureRequestWarning

    verify: bool | str = variables.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or True
    if _is_set("MLFLOW_TRACKING_INSECURE_TLS"):
        disable_warnings(InsecureRequestWarning)
        verify = False
    name, password, token = (variables.get(f"MLFLOW_TRACKING_{one}") for one in ("USERNAME", "PASSWORD", "TOKEN"))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if name and password:
        headers = {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}
    own = variables.get("MLFLOW_TRACKING_CLIENT_CERT_PATH")
    with requests.get(url, headers=headers, verify=verify, cert=own, timeout=ANSWER_SECONDS, stream=True) as answer:
        return answer.status_code, b"".join(islice(answer.iter_content(1 << 10), 1 << 10))


def _finding_of(address: str, host: str, status: int, body: bytes) -> Finding:
    """What the server's answer means."""
    if status == 200:
        try:
            json.loads(body)
        except ValueError:
            return Finding("wrong", f"what answers at {address} is not MLflow", f"curl {address}/version, and set MLFLOW_TRACKING_URI")
        return Finding("ok", f"MLflow answers at {address}")
    if status == 403 and body.startswith(b"Invalid Host header"):
        # The variable replaces the server's own list.
        fix = f"start the server with MLFLOW_SERVER_ALLOWED_HOSTS='{host},localhost:*,127.0.0.1:*'"
        return Finding("wrong", f"MLflow at {address} rejects the Host header {host} (403)", fix)
    if status in (401, 403):
        fix = "export MLFLOW_TRACKING_USERNAME=NAME MLFLOW_TRACKING_PASSWORD=PASSWORD"
        return Finding("wrong", f"MLflow at {address} denies access ({status})", fix)
    if status == 407:
        return Finding(
            "wrong", f"a proxy in front of {address} wants a password (407)", f"export NO_PROXY={host.rpartition(':')[0] or host}"
        )
    return Finding("wrong", f"MLflow at {address} answers {status}", LATER)
