"""Clusters, where the published reference of Geneva on Ray has them."""

from geneva.cluster import GenevaCluster, GenevaClusterType, K8sConfigMethod

__all__ = ["GenevaCluster", "GenevaClusterType", "K8sConfigMethod"]
