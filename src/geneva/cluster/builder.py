"""Building clusters, word by word."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from geneva.cluster import (
    SERVICE_ACCOUNT,
    ClusterType,
    GenevaCluster,
    K8sConfigMethod,
    KubeRayConfig,
    WorkerGroup,
    spark_memory,
)
from geneva.errors import UserInputError

_MIN_GPU_WORKER_BYTES = 4 * 2**30
_MUCH_BYTES, _MUCH_BYTES_PER_CORE = 100 * 10**9, 16 * 2**30
_UNITS = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class ClusterBuilder:
    """What all clusters can be given. Each method returns the builder."""

    kind = ClusterType.LOCAL

    def __init__(self, name: str) -> None:
        """Begin a cluster."""
        self._facts: dict[str, Any] = {"name": name, "cluster_type": self.kind.value}

    @classmethod
    def create(cls, name: str, *args: Any) -> Self:
        """Begin a cluster."""
        return cls(name, *args)

    def _with(self, **facts: Any) -> Self:
        self._facts.update(facts)
        return self

    def ray_init_kwargs(self, kwargs: Mapping[str, Any]) -> Self:
        """Keep Ray's own settings: they mean nothing here."""
        return self._with(ray_init_kwargs=dict(kwargs))

    def conf(self, settings: Mapping[str, str]) -> Self:
        """Settings of the Spark session: `{"spark.task.cpus": "2"}`."""
        more = {str(key): str(value) for key, value in settings.items()}
        return self._with(conf={**self._facts.get("conf", {}), **more})

    def build(self) -> GenevaCluster:
        """Make the cluster."""
        return GenevaCluster(**self._facts)


class LocalRayClusterBuilder(ClusterBuilder):
    """This machine."""


class SparkClusterBuilder(ClusterBuilder):
    """A Spark cluster: a master, or a Connect server."""

    kind = ClusterType.SPARK

    def master(self, address: str) -> Self:
        """The master: `spark://host:7077`, `yarn`, `k8s://...`, `local[4]`."""
        return self._with(address=address)

    def remote(self, address: str) -> Self:
        """The Connect server: `sc://host:15002`."""
        return self._with(address=address)

    def executors(self, count: int) -> Self:
        """How many executors."""
        return self.conf({"spark.executor.instances": str(count)})

    def cores(self, count: int) -> Self:
        """Cores of each."""
        return self.conf({"spark.executor.cores": str(count)})

    def memory(self, amount: str) -> Self:
        """Memory of each: `8g`, `8Gi`."""
        return self.conf({"spark.executor.memory": spark_memory(amount)})

    def gpus(self, count: int) -> Self:
        """GPUs of each."""
        return self.conf({"spark.executor.resource.gpu.amount": str(count)})


class ExternalRayClusterBuilder(ClusterBuilder):
    """A cluster that is running already."""

    kind = ClusterType.EXTERNAL

    def __init__(self, name: str, address: str) -> None:
        """Begin a cluster at an address."""
        super().__init__(name)
        self._with(ray_address=address)


class WorkerBuilder:
    """Workers of one kind."""

    def __init__(self, group: WorkerGroup) -> None:
        """Begin with defaults."""
        self._group = group

    def _with(self, **facts: Any) -> Self:
        self._group = replace(self._group, **facts)
        return self

    def cpus(self, count: float) -> Self:
        """Cores of each."""
        return self._with(cpus=count)

    def memory(self, amount: str) -> Self:
        """Memory of each."""
        spark_memory(amount)
        return self._with(memory=amount)

    def gpus(self, count: int) -> Self:
        """GPUs of each."""
        return self._with(gpus=count)

    def replicas(self, count: int) -> Self:
        """How many."""
        return self._with(replicas=count)

    def min_replicas(self, count: int) -> Self:
        """At least so many."""
        return self._with(min_replicas=count)

    def max_replicas(self, count: int) -> Self:
        """At most so many."""
        return self._with(max_replicas=count)

    def idle_timeout_seconds(self, seconds: int) -> Self:
        """Keep how long a worker may idle: Spark's dynamic allocation has settings of its own."""
        return self._with(idle_timeout_seconds=seconds)

    def image(self, image: str) -> Self:
        """Keep an image's name: it is of Ray on Kubernetes."""
        return self._with(image=image)

    def service_account(self, account: str) -> Self:
        """Keep an account's name: it is of Kubernetes."""
        return self._with(service_account=account)

    def node_selector(self, labels: Mapping[str, str]) -> Self:
        """Keep labels of nodes: they are of Kubernetes."""
        return self._with(node_selector=dict(labels))

    def build(self) -> WorkerGroup:
        """Make the group."""
        group = self._group
        if group.gpus and _bytes(group.memory) < _MIN_GPU_WORKER_BYTES:
            raise UserInputError(f"A GPU worker needs 4Gi of memory or more, not {group.memory!r}.")
        if _bytes(group.memory) > min(_MUCH_BYTES, group.cpus * _MUCH_BYTES_PER_CORE):
            warnings.warn(
                f"A worker of {group.cpus:g} cores and {group.memory} asks for much memory.",
                UserWarning,
                stacklevel=2,
            )
        return group


class CpuWorkerBuilder(WorkerBuilder):
    """Workers without GPUs."""

    def __init__(self) -> None:
        """Begin with 4 cores and 8Gi."""
        labels = {"geneva.lancedb.com/ray-worker-cpu": "true"}
        super().__init__(WorkerGroup(cpus=4, memory="8Gi", node_selector=labels))


class GpuWorkerBuilder(WorkerBuilder):
    """Workers with GPUs."""

    def __init__(self, gpus: int = 1) -> None:
        """Begin with 8 cores, 16Gi and one GPU."""
        labels = {"geneva.lancedb.com/ray-worker-gpu": "true"}
        super().__init__(WorkerGroup(cpus=8, memory="16Gi", gpus=gpus, node_selector=labels))


class KubeRayClusterBuilder(ClusterBuilder):
    """A Ray cluster on Kubernetes. Here it says how large the executors are to be."""

    kind = ClusterType.KUBERAY

    def __init__(self, name: str) -> None:
        """Begin with a head of 4 cores and 8Gi, and no workers."""
        super().__init__(name)
        head = {
            "service_account": SERVICE_ACCOUNT,
            "cpus": 4,
            "memory": "8Gi",
            "node_selector": {"geneva.lancedb.com/ray-head": "true"},
        }
        self._kuberay = KubeRayConfig(head_group=head)

    def _kube(self, **facts: Any) -> Self:
        self._kuberay = replace(self._kuberay, **facts)
        return self

    def namespace(self, namespace: str) -> Self:
        """Keep Kubernetes' namespace."""
        return self._kube(namespace=namespace)

    def aws_config(self, region: str | None = None, **others: Any) -> Self:
        """Keep the region."""
        return self._kube(aws_region=region)

    def config_method(self, method: K8sConfigMethod | str) -> Self:
        """Keep how Kubernetes is reached."""
        return self._kube(config_method=str(method))

    def head_group(self, **facts: Any) -> Self:
        """Keep what the head is to be."""
        return self._kube(head_group={**self._kuberay.head_group, **facts})

    def add_worker_group(self, group: WorkerGroup | WorkerBuilder) -> Self:
        """Add workers of one kind."""
        made = group.build() if isinstance(group, WorkerBuilder) else group
        return self._kube(worker_groups=[*self._kuberay.worker_groups, made])

    def ray_init_kwargs(self, kwargs: Mapping[str, Any]) -> Self:
        """Keep Ray's own settings: they mean nothing here."""
        super().ray_init_kwargs(kwargs)
        return self._kube(ray_init_kwargs=dict(kwargs))

    @staticmethod
    def cpu_worker() -> CpuWorkerBuilder:
        """Begin workers without GPUs."""
        return CpuWorkerBuilder()

    @staticmethod
    def gpu_worker(gpus: int = 1) -> GpuWorkerBuilder:
        """Begin workers with GPUs."""
        return GpuWorkerBuilder(gpus)

    def build(self) -> GenevaCluster:
        """Make the cluster."""
        return GenevaCluster(**self._facts, kuberay=self._kuberay)


def _bytes(amount: str) -> int:
    text = spark_memory(amount)
    return int(text[:-1]) * _UNITS[text[-1]]
