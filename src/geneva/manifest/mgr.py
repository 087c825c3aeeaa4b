"""Manifests, where the published reference of Geneva on Ray has them."""

from geneva.manifest import GenevaManifest

__all__ = ["GenevaManifest"]
