"""Which pod of Kubernetes this is: what its API is asked about later, when the pod has ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from haiprof.linux.procfs import read_text

SERVICE_ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"
"""Below the root of a container: namespace, token and certificate, as the kubelet mounts them."""
_UID = re.compile(r"/pods/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/")
"""In the path on the node of what the kubelet mounts: /etc/hosts, the termination log."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def find_pod(environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, str | None] | None:
    """`name`, `namespace` and `uid` of the pod; None where this is none.

    POD_NAME, POD_NAMESPACE and POD_UID where the pod's template sets them (the downward API), else
    the host name, the service account's namespace, and the kubelet's mounts.
    """
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    mounted = _UID.search(read_text(root / "proc/self/mountinfo") or "")
    name = environ.get("POD_NAME") or read_text(root / "etc/hostname") or ""
    space = environ.get("POD_NAMESPACE") or read_text(root / SERVICE_ACCOUNT / "namespace")
    uid = environ.get("POD_UID") or (mounted[1] if mounted else None)
    if not is_pod_name(name) or not is_pod_name(space):
        return None
    return {"name": name, "namespace": space, "uid": uid}


def is_pod_name(name: object) -> bool:
    """Whether a text may be the name of a pod or of a namespace, and with it a part of a path."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None
