"""The checkpoint stores, under the name that Geneva's users know.

`LanceCheckpointStore(f"{table.ref.uri}/_checkpoints").list_keys("udf-compute_embedding_")` lists
what a function has computed that is not yet published.
"""

from geneva.storage.checkpoints.store import (
    CheckpointStore,
    InMemoryCheckpointStore,
    LanceCheckpointStore,
)

__all__ = ["CheckpointStore", "InMemoryCheckpointStore", "LanceCheckpointStore"]
