"""Cores and GPUs of one machine, shared out among tasks: what resource profiles do on a cluster.

Spark has no profiles in local mode. Here the driver gives a task its share before its Spark job
starts, and the task's Python process belongs to one slot of one GPU: it sees that GPU alone, and
the model that it loads is the only one of that slot.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from geneva.errors import JobCancelledError
from geneva.model.computation import Resources
from geneva.spark.worker_daemon import SLOT_VARIABLE

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_NONE_VISIBLE = ("", "-1", "none", "void")
_EPSILON = 1e-6
_POLL_SECONDS = 0.2


def visible_gpus(
    environment: Mapping[str, str], limit: int | None = None, devices: Path = Path("/dev")
) -> tuple[str, ...]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them; `limit`: use so many.

    A limit without a GPU in sight is believed: the device files may be elsewhere.
    """
    listed = environment.get(VISIBLE_DEVICES)
    if listed is not None:
        names = (name.strip() for name in listed.split(","))
        # As CUDA reads it: what follows a name that is none is not seen.
        found = tuple(takewhile(lambda name: name.lower() not in _NONE_VISIBLE, names))
    else:
        count = len(list(devices.glob("nvidia[0-9]*")))
        found = tuple(str(number) for number in range(count))
        if not found and limit is not None:
            found = tuple(str(number) for number in range(limit))
    return found if limit is None else found[:limit]


class _Gpu:
    """One GPU: the share of it that is free, and the slots that are taken."""

    def __init__(self, name: str | None) -> None:
        """`name` is None where no GPU was found: tasks that want one take turns all the same."""
        self.name, self.free = name, 1.0
        self.taken: set[int] = set()

    def take(self, share: float) -> int:
        """Take a share; return the number of the slot."""
        slot = next(number for number in range(len(self.taken) + 1) if number not in self.taken)
        self.taken.add(slot)
        self.free -= share
        return slot

    def give_back(self, share: float, slot: int) -> None:
        """Give a share back."""
        self.taken.remove(slot)
        self.free += share


class LocalSlots:
    """The shares of one machine. All jobs of a process have them in common."""

    def __init__(self, gpus: Sequence[str]) -> None:
        """Everything is free."""
        self._gpus = [_Gpu(name) for name in gpus] or [_Gpu(None)]
        self._cpus = 0.0
        self._changed = threading.Condition()

    def count(self, resources: Resources, cores: int) -> int:
        """How many tasks with these needs can run at once, of at most one per core."""
        slots = cores
        if resources.num_cpus:
            slots = min(slots, int(cores / resources.num_cpus + _EPSILON))
        if gpus := resources.num_gpus:
            if gpus <= 1:
                on_gpus = len(self._gpus) * int(1 / gpus + _EPSILON)
            else:
                on_gpus = len(self._gpus) // math.ceil(gpus)
            slots = min(slots, on_gpus)
        return max(1, slots)

    @contextmanager
    def held(
        self, resources: Resources, cores: int, is_cancelled: Callable[[], bool]
    ) -> Iterator[dict[str, str]]:
        """Hold a task's share, when it is free; gives the variables of its Python process."""
        cpus = min(resources.num_cpus or 0.0, cores)
        share, number = _per_gpu(resources.num_gpus or 0.0, len(self._gpus))
        with self._changed:
            while True:
                if is_cancelled():
                    raise JobCancelledError("The job was cancelled before its tasks started.")
                gpus = self._free_gpus(share, number)
                if len(gpus) == number and self._cpus + cpus <= cores + _EPSILON:
                    break
                self._changed.wait(_POLL_SECONDS)
            self._cpus += cpus
            slots = [gpu.take(share) for gpu in gpus]
        try:
            yield _variables(gpus, slots)
        finally:
            with self._changed:
                self._cpus -= cpus
                for gpu, slot in zip(gpus, slots, strict=True):
                    gpu.give_back(share, slot)
                self._changed.notify_all()

    def _free_gpus(self, share: float, number: int) -> list[_Gpu]:
        """The GPUs with the most room, if there is enough in them."""
        fitting = [gpu for gpu in self._gpus if gpu.free + _EPSILON >= share]
        return sorted(fitting, key=lambda gpu: -gpu.free)[:number]


def _per_gpu(wanted: float, available: int) -> tuple[float, int]:
    """The share of each GPU, and of how many: a part of one, or whole ones."""
    if not wanted:
        return 0.0, 0
    return (wanted, 1) if wanted <= 1 else (1.0, min(math.ceil(wanted), available))


def _variables(gpus: Sequence[_Gpu], slots: Sequence[int]) -> dict[str, str]:
    if not gpus:
        return {}
    names = [gpu.name for gpu in gpus if gpu.name is not None]
    places = ",".join(f"{gpu.name}.{slot}" for gpu, slot in zip(gpus, slots, strict=True))
    return {SLOT_VARIABLE: places} | ({VISIBLE_DEVICES: ",".join(names)} if names else {})


_SHARED: dict[tuple[str, ...], LocalSlots] = {}
_LOCK = threading.Lock()


def shared_slots(gpus: Sequence[str]) -> LocalSlots:
    """The shares of this machine, for all jobs of this process."""
    with _LOCK:
        return _SHARED.setdefault(tuple(gpus), LocalSlots(gpus))
