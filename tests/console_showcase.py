"""A small database that has something for every page of the console, also what is hostile."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import geneva
from geneva import Connection, udf
from geneva.cli.demo_udfs import make_pictures
from geneva.config import Settings
from geneva.execution.runner import InProcessRunner
from geneva.udf.policy import skip_on_error

HOSTILE = "<script>alert('x')</script>\"'&🦆"
STABLE = {"new_table_enable_stable_row_ids": "true"}


def connect(path: Path | str) -> Connection:
    """Connect with the runner of this process: no Java, no bars."""
    settings = Settings(local_slots=2, jvm_archive=False, progress=False)
    return geneva.connect(path, runner=InProcessRunner, settings=settings)


@udf
def words(caption: str) -> int:
    return len(caption.split())


@udf
def megapixels(width: int, height: int) -> float:
    return width * height / 1e6


@udf(data_type=pa.list_(pa.float32(), 64), input_columns=["image"])
def embedding(image: bytes) -> Any:
    seen = np.frombuffer(image[-512:].ljust(512, b"\0"), dtype=np.uint8).reshape(64, 8)
    return np.sin(np.cumsum(seen.mean(axis=1).astype(np.float32)) / 40).astype(np.float32)


@udf
def is_long(words: int) -> bool:
    return words > 4


@udf(on_error=skip_on_error())
def decoded(id: int, caption: str) -> int:
    if id % 97 == 13:
        raise ValueError(f"cannot decode the image of row {id}: <b>truncated</b> after 512 bytes")
    if id % 211 == 7:
        raise TimeoutError("the caption service did not answer within 30 s")
    return len(caption)


@udf
def strict(id: int) -> int:
    if id == 300:
        raise KeyError(f"no label for {id}")
    return id


@udf
def slow(id: int) -> int:
    time.sleep(0.02)
    return id


def make(path: Path | str, rows: int = 240) -> Connection:
    """Tables, computed columns, views, and jobs that ended well and badly."""
    db = connect(path)
    pictures = db.create_table("pictures", _pictures(0, rows), storage_options=STABLE)
    for start in range(rows, 3 * rows, rows):
        pictures.add(_pictures(start, rows))
    pictures.add_columns({"words": words, "megapixels": megapixels, "embedding": embedding})
    pictures.add_columns({"is_long": is_long, "decoded": decoded, "strict": strict})
    for name in ("words", "megapixels", "embedding", "is_long", "decoded"):
        pictures.backfill(name, commit_granularity=1)
    with suppress(geneva.errors.GenevaError):
        pictures.backfill("strict", commit_granularity=1)
    view = db.create_materialized_view(
        "long_captions",
        pictures.search(None)
        .where("words > 3")
        .select(
            {"id": "id", "caption": "caption", "shout": "upper(caption)", "vector": "embedding"}
        ),
    )
    view.refresh()
    db.create_materialized_view("shouts", view.search(None).select(["id", "shout"])).refresh()
    pictures.add(_pictures(3 * rows, rows // 4))
    return db


def add_hostile_names(db: Connection) -> None:
    """A table whose names and values try to be markup, and an empty one."""
    odd = db.create_table("odd-names", pa.table({"id": [1, 2], HOSTILE: [HOSTILE, "x" * 5000]}))
    odd.add_columns({f"copy of {HOSTILE}": (udf(_echo, name="<i>echo</i>"), [HOSTILE])})
    odd.backfill(f"copy of {HOSTILE}")
    db.create_table("empty", pa.table({"id": pa.array([], pa.int64())}))


def _echo(text: str) -> str:
    return text


def _pictures(start: int, count: int) -> pa.Table:
    made = make_pictures(start, count)
    return made if isinstance(made, pa.Table) else pa.Table.from_batches(list(made))


def run_slow_job(path: str, fragments: int, rows: int) -> None:
    """A backfill that takes its time, commit by commit."""
    db = connect(path)
    table = db.create_table("photos", pa.table({"id": range(rows)}))
    for number in range(1, fragments):
        table.add(pa.table({"id": range(number * rows, (number + 1) * rows)}))
    table.add_columns({"slow_model": slow})
    table.backfill("slow_model", commit_granularity=1, task_size=rows)


if __name__ == "__main__":
    run_slow_job(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
