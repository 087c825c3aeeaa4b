"""Tables of Geneva's own that programs open and read: jobs and errors."""

from __future__ import annotations

from typing import Any

from geneva.table import Table


class SystemTable(Table):
    """Jobs or errors as they were when it was opened. Its folder goes with the last who reads."""

    def to_lance(self, **kwargs: Any) -> Any:
        """The table as a Lance dataset, which keeps the folder, too."""
        dataset = super().to_lance(**kwargs)
        dataset._geneva_table = self
        return dataset
