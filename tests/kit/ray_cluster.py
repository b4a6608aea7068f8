"""Ray machines on this one, for as long as standard input is open: .venv-ray/bin/python tests/kit/ray_cluster.py NUMBER"""

import json
import os
import sys
import tempfile
from pathlib import Path

from ray.cluster_utils import Cluster


def main() -> None:
    # Where Ray writes down that a cluster runs, wherever its own files are; on a new machine it is not there.
    Path("/tmp/ray").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        each = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
        head = each | {"include_dashboard": True, "dashboard_port": 0, "temp_dir": folder}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        nodes = [cluster.head_node, *(cluster.add_node(**each) for _ in range(int(sys.argv[1]) - 1))]
        cluster.wait_for_nodes()
        pids = [node.all_processes["raylet"][0].process.pid for node in nodes]
        # Ray's processes have what they print to elsewhere; this line is for the test.
        said = {"address": cluster.address, "dashboard": cluster.head_node.webui_url, "raylets": pids}
        os.write(3, (json.dumps(said) + "\n").encode())
        sys.stdin.read()
        cluster.shutdown()


if __name__ == "__main__":
    main()
