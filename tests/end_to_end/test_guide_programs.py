"""Programs as guides for Geneva on Ray have them: they run as they are, and warn of nothing else.

Warnings are errors here, so that a word that is taken and means something else is expected by name.
"""

from __future__ import annotations

import io
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from PIL import Image

import geneva
from geneva import Connection, Fail, Retry, Skip, chunker, udf, udtf
from geneva.cluster import K8sConfigMethod
from geneva.cluster.builder import KubeRayClusterBuilder
from geneva.db import dataset_uses_stable_row_ids
from geneva.errors import CompatibilityWarning
from geneva.manifest import GenevaManifest
from geneva.partitioning import create_ivf_flat_index
from geneva.runners.ray._mgr import ray_cluster
from geneva.runners.ray.raycluster import ExitMode
from geneva.transformer import Chunker


def picture(number: int) -> bytes:
    kept = io.BytesIO()
    Image.fromarray(np.full((8, 8 + number, 3), number, np.uint8)).save(kept, "PNG")
    return kept.getvalue()


def test_embeddings_of_images(local_db: Connection) -> None:
    db = local_db
    pictures = pa.table({"id": range(6), "image": [picture(i) for i in range(6)]})
    images = db.create_table("images", pictures, mode="overwrite")

    @udf(data_type=pa.struct([("width", pa.int32()), ("height", pa.int32())]))
    def dimensions(image: bytes) -> dict[str, int]:
        width, height = Image.open(io.BytesIO(image)).size
        return {"width": width, "height": height}

    @udf(cuda=True, num_cpus=1, data_type=pa.list_(pa.float32(), 4))
    class Embedding(Callable):  # type: ignore[misc]
        def __init__(self, model: str = "small") -> None:
            self.model, self.is_loaded = model, False

        def setup(self) -> None:
            assert not self.is_loaded
            self.weights = np.ones((3, 4), np.float32)
            self.is_loaded = True

        def __call__(self, image: bytes) -> Any:
            if not self.is_loaded:
                self.setup()
            pixels = np.asarray(Image.open(io.BytesIO(image)), np.float32).reshape(-1, 3)
            return pixels.mean(0) @ self.weights

    @udf(input_columns=["dims.width", "dims.height"])
    def area(w: int, h: int) -> int:
        return w * h

    embedding: Any = Embedding
    images.add_columns({"dims": dimensions, "embedding": embedding("big")})
    images.add_columns({"area": area})
    for column in ("dims", "embedding", "area"):
        images.backfill(column, concurrency=2, checkpoint_size=4)
    found = images.search([9.0] * 4, vector_column_name="embedding").limit(1).to_list()
    assert (found[0]["id"], found[0]["area"]) == (3, 88)


class Piece(NamedTuple):
    chunk_id: int
    chunk: str


def test_chunks_of_documents(local_db: Connection) -> None:
    db = local_db

    @chunker
    def split(text: str) -> Iterator[Piece]:
        for place, word in enumerate(text.split()):
            yield Piece(place, word)

    @udf(data_type=pa.list_(pa.float32(), 2))
    class Embed:
        def __call__(self, batch: pa.RecordBatch) -> pa.Array:
            made = [[float(len(chunk)), 1.0] for chunk in batch["chunk"].to_pylist()]
            return pa.array(made, pa.list_(pa.float32(), 2))

    docs = db.create_table(
        "docs",
        data=[{"doc": i, "title": f"t{i}", "text": "one two " * i} for i in range(4)],
        storage_options={"new_table_enable_stable_row_ids": "true"},
    )
    assert isinstance(split, Chunker)
    assert dataset_uses_stable_row_ids(docs.to_lance())
    source = docs.search(None).select(["doc", "title", "text"])
    view = db.create_udtf_view("chunks", source=source, udtf=split)
    with db.local_ray_context():
        view.refresh()
    chunks = db.open_table("chunks")
    chunks.add_columns({"vector": Embed()})  # type: ignore[dict-item]
    chunks.backfill("vector")
    docs.add([{"doc": 9, "title": "new", "text": "a b c"}])
    docs.delete("doc = 3")
    view.refresh(concurrency=2, source_task_size=2, max_rows_per_fragment=100)
    chunks.checkout_latest()
    assert chunks.count_rows("vector IS NULL") == 3
    chunks.backfill("vector")
    assert chunks.count_rows("vector IS NOT NULL") == chunks.count_rows() == 2 + 4 + 3


def test_a_cluster_and_a_manifest(local_db: Connection) -> None:
    db = local_db
    cluster = (
        KubeRayClusterBuilder.create("my-cluster")
        .namespace("geneva")
        .config_method(K8sConfigMethod.LOCAL)
        .head_group(service_account="sa", cpus=2, node_selector={"ray-head": "true"})
        .add_worker_group(KubeRayClusterBuilder.cpu_worker().cpus(4).memory("8Gi").build())
        .add_worker_group(KubeRayClusterBuilder.gpu_worker(1).build())
        .ray_init_kwargs({"runtime_env": {"pip": ["numpy"]}})
        .build()
    )
    manifest = (
        GenevaManifest.create_pip("my-manifest")
        .pip(["numpy", "pyarrow"])
        .env_vars({"MODEL": "tiny"})
        .default_worker_image()
        .build()
    )
    db.define_cluster("my-cluster", cluster)
    db.define_manifest("my-manifest", manifest)

    @udf(data_type=pa.string(), manifest=manifest, num_cpus=1)
    def tag(a: int) -> str:
        import os

        return f"{os.environ['MODEL']}{a}"

    table = db.create_table("t", pa.table({"a": range(3)}))
    table.add_columns({"tag": tag})
    context = db.context(
        cluster="my-cluster", manifest="my-manifest", on_exit=ExitMode.RETAIN_ON_FAILURE
    )
    with pytest.warns(CompatibilityWarning, match="names no Spark master"), context:
        future = table.backfill_async("tag", concurrency=4)
    assert future.done()
    job = db.get_job(future.job_id)
    assert (job.cluster_name, job.manifest_id) == ("my-cluster", "my-manifest")
    assert table.to_pandas().tag.tolist() == ["tiny0", "tiny1", "tiny2"]


def test_a_loop_over_progress_and_the_history(local_db: Connection) -> None:
    db = local_db
    table = db.create_table("t", pa.table({"a": range(50)}))

    @udf(data_type=pa.int64(), checkpoint_size=20, task_size=50, version="1")
    def square(a: int) -> int:
        return a * a

    table.add_columns({"sq": square})
    future = table.backfill_async("sq", concurrency=2, commit_granularity=1)
    while not future.done():
        job = db.get_job(future.job_id)
        seen = {m["name"]: (m["count"], m["total"]) for m in job.metrics}
        for name in ("rows_checkpointed", "rows_ready_for_commit", "rows_committed"):
            assert seen[name][0] <= seen[name][1]
        time.sleep(0.01)
    future.result()
    assert db._history.get(future.job_id)[0].status == "DONE"
    jobs = sorted(db.list_jobs(table_name="t"), key=lambda j: j.launched_at, reverse=True)
    texts = [f"{event['timestamp']} {event['message']}" for event in jobs[0].events]
    assert texts[-1].endswith("Job completed with status DONE")
    kept = db.open_table("geneva_jobs", namespace=list(db.system_namespace))
    assert kept.search().where(f"job_id = '{future.job_id}'").to_list()[0]["status"] == "DONE"
    again = attrs.evolve(square, version=str(uuid.uuid4()))
    table.alter_columns({"path": "sq", "udf": again})
    assert table.backfill("sq").rows_computed == 50, "a version of its own forces it"


def test_errors_that_are_retried_skipped_and_listed(local_db: Connection) -> None:
    db = local_db
    rules = [Retry(ConnectionError, backoff="fixed"), Skip(ValueError, match="(?i)odd"), Fail()]

    @udf(data_type=pa.int64(), on_error=rules)
    def picky(a: int) -> int:
        if a % 5 == 1:
            raise ValueError("Odd one out")
        return a

    table = db.create_table("t", pa.table({"a": range(10)}))
    table.add_columns({"p": picky})
    job = table.backfill("p")
    errors = table.get_errors(job_id=job.job_id)
    assert sorted((e.error_type, e.udf_name, e.row_address) for e in errors) == [
        ("ValueError", "picky", 1),
        ("ValueError", "picky", 6),
    ]
    assert db.get_job(job.job_id).status == "DONE"

    @udf(data_type=pa.int64())
    def fixed(a: int) -> int:
        return -a

    table.alter_columns({"path": "p", "udf": fixed})
    table.backfill("p", where="p IS NULL")
    assert table.to_pandas().p.tolist()[:3] == [0, -1, 2], "the others are carried"


def test_views_with_filters(local_db: Connection) -> None:
    db = local_db
    lengths = [float(i) for i in range(20)]
    names = [f"n{i}" for i in range(20)]
    videos = db.create_table("videos", pa.table({"id": range(20), "dur": lengths, "name": names}))

    @udf(data_type=pa.float64())
    def minutes(dur: float) -> float:
        return dur / 60

    query = videos.search(None).where("dur > 10").shuffle(seed=42)
    query = query.select({"id": "id", "loud": "upper(name)", "minutes": minutes})
    view = db.create_materialized_view("v", query)
    view.refresh(concurrency=2)
    assert view.count_rows() == 9
    before = view.version
    videos.add(pa.table({"id": [99], "dur": [99.0], "name": ["new"]}))
    db.refresh("v")
    view.checkout_latest()
    assert (view.count_rows(), view.version > before) == (10, True)
    above = db.create_materialized_view("vv", view.search().where("minutes > 1").select(["id"]))
    above.refresh_async().result()
    assert above.to_arrow()["id"].to_pylist() == [99]
    view.checkout(version=before)
    assert view.count_rows() == 9


def test_arrays_lists_loads_and_partitions(local_db: Connection, tmp_path: Path) -> None:
    db = local_db
    vectors = pa.array([[i, i + 1.0] for i in range(8)], pa.list_(pa.float32(), 2))
    rows = pa.table({"id": range(8), "txt": ["hello world"] * 8, "vec": vectors})
    table = db.create_table("t", rows)

    @udf(data_type=pa.float32())
    def norm(vec: np.ndarray) -> float:
        return float(np.linalg.norm(vec))

    @udf(data_type=pa.int32())
    def words(txt: pa.Array) -> pa.Array:
        return pc.cast(pc.list_value_length(pc.split_pattern(txt, " ")), pa.int32())

    @udf
    def twice(a: list[float], b: list[float]) -> list[float]:
        return a + b

    table.add_columns({"norm": norm, "words": words, "twice": (twice, ["vec", "vec"])})
    table.backfill("norm", where="id < 5")
    table.backfill("norm", where="id >= 5 and norm is null")
    for column in ("words", "twice"):
        table.backfill(column, num_frags=1, _admission_check=False)
    last = table.to_pandas().iloc[-1]
    assert (last.words, last.twice.tolist()) == (2, [7.0, 8.0, 7.0, 8.0])
    pq.write_table(pa.table({"id": range(6), "score": range(6)}), tmp_path / "part-0.parquet")
    table.load_columns(str(tmp_path / "part-0.parquet"), pk="id", columns=["score"])
    assert table.count_rows("score IS NULL") == 2
    create_ivf_flat_index(table, "vec", k=2)
    schema = pa.schema([("first", pa.int64()), ("n", pa.int64())])

    @udtf(output_schema=schema, partition_by_indexed_column="vec", num_cpus=1.0)
    class Counting:
        def __init__(self, step: int = 1) -> None:
            self.step = step

        def __call__(self, source: geneva.GenevaQueryBuilder) -> Iterator[pa.Table]:
            found = source.to_arrow()
            made = {"first": [found["id"][0].as_py()], "n": [found.num_rows * self.step]}
            yield pa.table(made, schema=schema)

    counting: Any = Counting
    view = db.create_udtf_view("n", source=table.search(None).select(["id"]), udtf=counting(step=2))
    with ray_cluster(local=True, extra_env={"X": "1"}, log_to_driver=False):
        view.refresh()
    assert sum(view.to_arrow()["n"].to_pylist()) == 16
