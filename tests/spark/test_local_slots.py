"""Shares of one machine: how many tasks at once, and which GPU each of them sees. No Spark."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from geneva.errors import JobCancelledError
from geneva.model.computation import Resources
from geneva.spark.local_slots import SLOT_VARIABLE, VISIBLE_DEVICES, LocalSlots, visible_gpus

NEVER = bool  # is_cancelled: bool() is False


class TestVisibleGpus:
    @pytest.mark.parametrize(
        ("listed", "found"),
        [
            ("0,1", ("0", "1")),
            (" 3 ", ("3",)),
            ("GPU-a,GPU-b", ("GPU-a", "GPU-b")),
            ("", ()),
            ("-1", ()),
            ("none", ()),
            ("0,1,", ("0", "1")),
            ("2,-1,1", ("2",)),
        ],
    )
    def test_the_variable_decides(
        self, tmp_path: Path, listed: str, found: tuple[str, ...]
    ) -> None:
        (tmp_path / "nvidia0").touch()
        assert visible_gpus({VISIBLE_DEVICES: listed}, devices=tmp_path) == found

    def test_else_the_device_files(self, tmp_path: Path) -> None:
        for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
            (tmp_path / name).touch()
        assert visible_gpus({}, devices=tmp_path) == ("0", "1")

    def test_a_limit(self, tmp_path: Path) -> None:
        assert visible_gpus({VISIBLE_DEVICES: "4,5,6"}, 2) == ("4", "5")
        assert visible_gpus({}, 2, devices=tmp_path) == ("0", "1"), "believed"
        assert visible_gpus({VISIBLE_DEVICES: "4"}, 0) == ()


@pytest.mark.parametrize(
    ("gpus", "num_gpus", "num_cpus", "slots"),
    [
        (1, 1, None, 1),
        (1, 0.25, None, 4),
        (1, 0.3, None, 3),
        (2, 1, None, 2),
        (2, 0.5, None, 4),
        (4, 2, None, 2),
        (4, 1.5, None, 2),
        (1, 2, None, 1),
        (0, 1, None, 1),
        (0, 0.5, None, 2),
        (1, 0.01, None, 8),
        (1, None, 3, 2),
        (1, None, 100, 1),
        (1, None, 0.5, 8),
        (2, 0.5, 4, 2),
    ],
)
def test_slots_are_the_least_of_what_there_is(
    gpus: int, num_gpus: float | None, num_cpus: float | None, slots: int
) -> None:
    machine = LocalSlots([str(number) for number in range(gpus)])
    assert machine.count(Resources(num_cpus, num_gpus), cores=8) == slots


def test_a_gpu_is_seen_by_the_task_that_has_it() -> None:
    machine = LocalSlots(["4", "5"])
    whole = Resources(num_gpus=1)
    with machine.held(whole, 8, NEVER) as first, machine.held(whole, 8, NEVER) as second:
        assert {first[VISIBLE_DEVICES], second[VISIBLE_DEVICES]} == {"4", "5"}
    with machine.held(Resources(num_gpus=2), 8, NEVER) as both:
        assert sorted(both[VISIBLE_DEVICES].split(",")) == ["4", "5"]


def test_fractions_are_spread_and_have_slots_of_their_own() -> None:
    machine, half = LocalSlots(["0", "1"]), Resources(num_gpus=0.5)
    held = [machine.held(half, 8, NEVER) for _ in range(4)]
    found = [share.__enter__() for share in held]
    assert [variables[VISIBLE_DEVICES] for variables in found[:2]] == ["0", "1"]
    assert sorted(variables[SLOT_VARIABLE] for variables in found) == ["0.0", "0.1", "1.0", "1.1"]
    held[0].__exit__(None, None, None)
    with machine.held(half, 8, NEVER) as again:
        assert again == found[0], "the same slot, and the same process"
    for share in held[1:]:
        share.__exit__(None, None, None)


def test_without_a_gpu_tasks_take_turns_and_see_what_they_saw_before() -> None:
    machine = LocalSlots([])
    with machine.held(Resources(num_gpus=1), 8, NEVER) as variables:
        assert list(variables) == [SLOT_VARIABLE]


def test_a_cancelled_task_does_not_wait_on() -> None:
    machine, cancelled = LocalSlots(["0"]), threading.Event()
    whole = Resources(num_gpus=1)
    with machine.held(whole, 8, NEVER):
        threading.Timer(0.05, cancelled.set).start()
        with pytest.raises(JobCancelledError), machine.held(whole, 8, cancelled.is_set):
            pytest.fail("there was no room")


def test_no_more_is_given_than_there_is() -> None:
    machine, draw = LocalSlots(["0", "1"]), random.Random(3)
    wanted = [
        Resources(draw.choice([None, 2, 3]), draw.choice([None, 0.5, 0.34, 1, 2]))
        for _ in range(40)
    ]
    running: list[tuple[Resources, dict[str, str]]] = []
    lock, wrong = threading.Lock(), list[str]()

    def task(resources: Resources) -> None:
        with machine.held(resources, 4, NEVER) as variables:
            with lock:
                running.append((resources, variables))
                if sum(each.num_cpus or 0 for each, _ in running) > 4:
                    wrong.append("cores")
                for gpu in ("0", "1"):
                    shares = (
                        min(each.num_gpus or 0, 1)
                        for each, seen in running
                        if gpu in seen.get(VISIBLE_DEVICES, "").split(",")
                    )
                    if sum(shares) > 1.0001:
                        wrong.append("gpu")
                slots = [s for _, seen in running for s in seen.get(SLOT_VARIABLE, "").split(",")]
                slots = [slot for slot in slots if slot]
                if len(slots) != len(set(slots)):
                    wrong.append("slot")
            time.sleep(0.002)
            with lock:
                running.remove((resources, variables))

    threads = [threading.Thread(target=task, args=(resources,)) for resources in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
