"""The words with which programs for Geneva on Ray describe a cluster on Kubernetes."""

from geneva.cluster import K8sConfigMethod, WorkerGroup
from geneva.contexts import ExitMode

__all__ = ["ExitMode", "K8sConfigMethod", "WorkerGroup"]
