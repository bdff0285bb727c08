"""Ray Jobs: a driver that starts haiprof once on each of its nodes, for `ray job submit`."""

from __future__ import annotations

from haiprof.launch.submit.node import STATIC_PORT, haiprof_words, rank_words, script_words
from haiprof.launch.submit.spec import JobSpec

_DRIVER = '''\
"""{name} under haiprof on {nodes} nodes of a Ray cluster.

    ray job submit --working-dir . -- python THIS_FILE.py
"""

import os
import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = {nodes}
PORT = {port}
RESOURCES = {resources!r}  # of each node
ENVIRONMENT = {environment!r}
HAIPROF = {haiprof!r}
TORCHRUN = {torchrun!r}
SCRIPT = {script!r}


@ray.remote(max_retries=0)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def run_node(rank, head, run_id):
    nodes = [f"--node-rank={{rank}}", f"--master-addr={{head}}", f"--master-port={{PORT}}"]
    nodes = nodes if NODES > 1 else ["--standalone"]
    command = [*HAIPROF, f"--run-id={{run_id}}", "--", *TORCHRUN, *nodes, *SCRIPT]
    environment = {{**os.environ, **ENVIRONMENT}}
    return subprocess.run(command, env=environment, check=False).returncode


ray.init()
group = placement_group([RESOURCES] * NODES, strategy="STRICT_SPREAD")
ray.get(group.ready())


def on(rank):
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return {{"scheduling_strategy": strategy, "num_cpus": RESOURCES["CPU"],
            "num_gpus": RESOURCES.get("GPU", 0)}}


head = ray.get(address.options(**on(0)).remote())
run_id = time.strftime("%Y%m%d-%H%M%S")
left = [run_node.options(**on(rank)).remote(rank, head, run_id) for rank in range(NODES)]
while left:
    (ended,), left = ray.wait(left)
    status = ray.get(ended)
    if status:  # the others would wait for this node
        sys.exit(status if status > 0 else 128 - status)
'''


def ray_driver(spec: JobSpec) -> str:
    """The driver, whole: what it starts is data in it, and never passes through a shell."""
    return _DRIVER.format(
        name=spec.name,
        nodes=spec.nodes,
        port=STATIC_PORT,
        resources=_resources(spec),
        environment=dict(spec.environment),
        haiprof=["haiprof", *haiprof_words(spec)],
        torchrun=["torchrun", *rank_words(spec)],
        script=script_words(spec),
    )


def _resources(spec: JobSpec) -> dict[str, int]:
    gpus = {"GPU": spec.gpus_per_node} if spec.gpus_per_node else {}
    return {"CPU": spec.cpus_per_node or 1, **gpus}
