"""The keys of checkpoints: how they are made of what they stand for, and read again."""

from geneva.storage.checkpoints.store import CheckpointKey, WorkIdentity

__all__ = ["CheckpointKey", "WorkIdentity"]
