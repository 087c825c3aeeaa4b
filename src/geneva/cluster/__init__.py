"""Where jobs run, by name: the settings of a Spark session."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from geneva.config import time_of, user_name
from geneva.errors import UserInputError

if TYPE_CHECKING:
    from geneva.cluster.builder import (
        ExternalRayClusterBuilder,
        KubeRayClusterBuilder,
        LocalRayClusterBuilder,
        SparkClusterBuilder,
    )

__all__ = [
    "ClusterType",
    "GenevaCluster",
    "GenevaClusterType",
    "K8sConfigMethod",
    "KubeRayConfig",
    "WorkerGroup",
]

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
SERVICE_ACCOUNT = "geneva-service-account"
_MASTERS = ("local", "spark:", "yarn", "k8s:", "mesos:")


class ClusterType(StrEnum):
    """What kind of cluster it was described as."""

    SPARK = "SPARK"
    LOCAL = "LOCAL_RAY"
    KUBERAY = "KUBE_RAY"
    EXTERNAL = "EXTERNAL_RAY"


GenevaClusterType = ClusterType
"""The same, by Geneva's name."""


class K8sConfigMethod(StrEnum):
    """How a program for Ray reaches Kubernetes; kept, and not used here."""

    LOCAL = "LOCAL"
    EKS_AUTH = "EKS_AUTH"
    IN_CLUSTER = "IN_CLUSTER"


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """Workers of one kind: the executors of a Spark session."""

    cpus: float = 4
    memory: str = "8Gi"
    gpus: int = 0
    replicas: int = 1
    min_replicas: int = 0
    max_replicas: int = 100
    idle_timeout_seconds: int = 60
    image: str | None = None
    service_account: str | None = SERVICE_ACCOUNT
    node_selector: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class KubeRayConfig:
    """A cluster as programs for Ray on Kubernetes describe it."""

    namespace: str = "geneva"
    head_group: dict[str, Any] = field(default_factory=dict)
    worker_groups: list[WorkerGroup] = field(default_factory=list)
    config_method: str = K8sConfigMethod.LOCAL.value
    aws_region: str | None = None
    ray_init_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GenevaCluster:
    """A cluster by name. Made by a builder: `GenevaCluster.create_spark("c").master(...)`.

    `spark_address` and `spark_conf` say what it is on Spark. A description of a Ray cluster has no
    address that Spark knows: it means "here", with as many resources as it asks for.
    """

    cluster_type: str
    name: str
    kuberay: KubeRayConfig | None = None
    ray_address: str | None = None
    ray_init_kwargs: dict[str, Any] = field(default_factory=dict)
    address: str | None = None
    """A Spark master (`spark://...`, `yarn`, `k8s://...`, `local[4]`) or a Connect server (`sc://`)."""
    conf: dict[str, str] = field(default_factory=dict)
    """Settings of the Spark session."""
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    created_by: str = field(default_factory=user_name)

    def __post_init__(self) -> None:
        """Check the name, and read the time that plain values have as text."""
        object.__setattr__(self, "created_at", time_of(self.created_at))
        self.validate()

    def validate(self) -> None:
        """Refuse what can't be a cluster."""
        if not _NAME.fullmatch(str(self.name)):
            raise UserInputError(
                f"A cluster's name is made of lowercase letters, digits and hyphens, not "
                f"{self.name!r}."
            )

    @property
    def spark_address(self) -> str | None:
        """The master or Connect server of the session; None: the embedded Spark of this process."""
        given = self.address or self.ray_address or ""
        return given if given.startswith(("sc://", *_MASTERS)) else None

    @property
    def spark_conf(self) -> dict[str, str]:
        """The settings of the session."""
        groups = self.kuberay.worker_groups if self.kuberay is not None else []
        if not groups:
            return dict(self.conf)
        largest = max(groups, key=lambda group: (group.gpus, group.cpus))
        settings = {
            "spark.executor.instances": str(sum(max(1, group.replicas) for group in groups)),
            "spark.executor.cores": str(max(1, int(largest.cpus))),
            "spark.executor.memory": spark_memory(largest.memory),
        }
        if largest.gpus:
            settings["spark.executor.resource.gpu.amount"] = str(largest.gpus)
        return {**settings, **self.conf}

    def as_dict(self) -> dict[str, Any]:
        """The cluster as plain values."""
        return {**asdict(self), "created_at": self.created_at.isoformat()}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> GenevaCluster:
        """A cluster from plain values."""
        given = dict(facts)
        kuberay = given.pop("kuberay", None)
        if kuberay is not None:
            groups = [WorkerGroup(**group) for group in kuberay.pop("worker_groups", [])]
            given["kuberay"] = KubeRayConfig(**kuberay, worker_groups=groups)
        return cls(**given)

    @staticmethod
    def create_spark(name: str) -> SparkClusterBuilder:
        """Begin a Spark cluster."""
        from geneva.cluster.builder import SparkClusterBuilder

        return SparkClusterBuilder(name)

    @staticmethod
    def create_local(name: str) -> LocalRayClusterBuilder:
        """Begin a cluster that is this machine."""
        from geneva.cluster.builder import LocalRayClusterBuilder

        return LocalRayClusterBuilder(name)

    @staticmethod
    def create_kuberay(name: str) -> KubeRayClusterBuilder:
        """Begin a description of a Ray cluster on Kubernetes."""
        from geneva.cluster.builder import KubeRayClusterBuilder

        return KubeRayClusterBuilder(name)

    @staticmethod
    def create_external(name: str, address: str) -> ExternalRayClusterBuilder:
        """Begin a cluster that is running already, at an address of Spark's (or of Ray's)."""
        from geneva.cluster.builder import ExternalRayClusterBuilder

        return ExternalRayClusterBuilder(name, address)


def spark_memory(amount: str) -> str:
    """An amount of memory as Spark writes it: `8Gi` is `8g`."""
    found = re.fullmatch(r"(\d+)\s*([KMGT])?i?[Bb]?", str(amount).strip(), re.IGNORECASE)
    if found is None:
        raise UserInputError(f"{amount!r} is no amount of memory, such as '8Gi'.")
    return f"{found[1]}{(found[2] or 'b').lower()}"
