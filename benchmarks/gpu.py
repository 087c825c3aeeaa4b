"""What is timed on a real GPU: `python -m benchmarks gpu`. Needs torch, and Pillow for images.

Two shapes. An encoder of tokens, where everything but the model has to be hidden behind it: the
reference is the same function on data in memory. And images that are decoded on the cores for one
model on the GPU: the reference is a loop that one would write by hand, around torch's DataLoader.
"""

from __future__ import annotations

import importlib.util
import io
import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from benchmarks.cases import Bench, Outcome, Target
from benchmarks.device import TOKENS, time_alone, token_table
from geneva import udf
from geneva.spark.embedded.settings import available_cores

if TYPE_CHECKING:
    import torch

ENCODER_ROWS, ENCODER_BATCH, ENCODER_WIDTH = 1_500_000, 1024, 384
IMAGE_ROWS, IMAGE_BATCH, IMAGE_WIDTH = 16_000, 256, 768
STORED, DECODED = 512, 224
DISTINCT = 256
"""Images that differ: they are decoded once per row all the same."""


def has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def vectors(values: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def layers(width: int, heads: int, depth: int):
    import torch

    layer = torch.nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return torch.nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


class Encoder:
    """6 layers, 384 wide, bf16: the mean over 64 tokens."""

    def setup(self) -> None:
        import torch

        torch.manual_seed(0)
        parts = (torch.nn.Embedding(30_000, ENCODER_WIDTH), layers(ENCODER_WIDTH, 6, 6))
        self.model = torch.nn.Sequential(*parts).to("cuda", torch.bfloat16).eval()

    def __call__(self, tokens: pa.Array) -> torch.Tensor:
        import torch

        rows = np.array(tokens.flatten()).reshape(len(tokens), TOKENS)
        with torch.inference_mode():
            ids = torch.from_numpy(rows).to("cuda", non_blocking=True)
            return self.model(ids).mean(dim=1).float().cpu()


def encoder(bench: Bench) -> Outcome | None:
    if not has_gpu():
        return None
    outcome = Outcome(
        "encoder",
        f"encoder of 6 layers, 384-d, bf16, {TOKENS} tokens, 1 slot; the model alone in memory",
        target=Target(1 / 0.95, "alone"),
    )
    data = token_table(bench.rows(ENCODER_ROWS, least=2 * ENCODER_BATCH))
    table = bench.table(outcome.name, data, 4)
    kind = pa.list_(pa.float32(), ENCODER_WIDTH)
    function = udf(data_type=kind, batch_size=ENCODER_BATCH, num_gpus=1)(Encoder)
    warm(bench, "encoder_warm", data.slice(0, 8 * ENCODER_BATCH), function())
    column = data["tokens"].combine_chunks()
    alone = Encoder()
    alone.setup()
    time_alone(alone, column[: 8 * ENCODER_BATCH], ENCODER_BATCH)
    for run in range(bench.repeat):
        outcome.runs.append(timed_backfill(table, f"geneva_{run}", function(), outcome))
        outcome.loop_runs.append(time_alone(alone, column, ENCODER_BATCH))
    return outcome


# -------------------------------------------------------------------------------------- images


def decoded(jpeg: bytes) -> np.ndarray:
    from PIL import Image

    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    return np.asarray(image.resize((DECODED, DECODED), Image.Resampling.BILINEAR))


class ImageModel:
    """ViT-B/16 in bf16, with random weights: what it costs is the same."""

    def setup(self) -> None:
        import torch

        torch.manual_seed(0)
        self.patches = torch.nn.Conv2d(3, IMAGE_WIDTH, 16, 16).to("cuda", torch.bfloat16)
        self.places = torch.zeros(1, 196, IMAGE_WIDTH, device="cuda", dtype=torch.bfloat16)
        self.model = layers(IMAGE_WIDTH, 12, 12).to("cuda", torch.bfloat16).eval()

    def embed(self, images) -> np.ndarray:
        """Vectors of a batch of uint8 images (rows, height, width, 3), a tensor on the CPU."""
        import torch

        with torch.inference_mode():
            pixels = images.to("cuda", non_blocking=True).permute(0, 3, 1, 2)
            pixels = (pixels.to(torch.bfloat16) / 127.5) - 1
            tokens = self.patches(pixels).flatten(2).transpose(1, 2) + self.places
            return self.model(tokens).mean(dim=1).float().cpu().numpy()


class EmbedImages(ImageModel):
    """The same as a UDF: decodes ahead on the cores, in processes, and embeds on the GPU."""

    def setup_prepare(self) -> None:
        from PIL import Image  # noqa: F401  imported once, before the first image

    def prepare(self, image: pa.Array) -> np.ndarray:
        images = np.empty((len(image), DECODED, DECODED, 3), dtype=np.uint8)
        for place, jpeg in enumerate(image):
            images[place] = decoded(jpeg.as_buffer())
        return images

    def __call__(self, images: np.ndarray) -> pa.Array:
        import torch

        return vectors(self.embed(torch.from_numpy(images)))


class Images:
    """A dataset for torch's DataLoader."""

    def __init__(self, jpegs: list[bytes], rows: int) -> None:
        self.jpegs, self.rows = jpegs, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> np.ndarray:
        return decoded(self.jpegs[row % len(self.jpegs)]).copy()


def jpegs() -> list[bytes]:
    from PIL import Image

    made, draw = [], np.random.default_rng(0)
    for _ in range(DISTINCT):
        coarse = draw.integers(0, 255, (STORED // 8, STORED // 8, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((STORED, STORED), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        image.save(file, "JPEG", quality=85)
        made.append(file.getvalue())
    return made


def images(bench: Bench) -> Outcome | None:
    """Decode and embed; against a DataLoader with as many workers as there are cores."""
    if not has_gpu() or importlib.util.find_spec("PIL") is None:
        return None
    cores = available_cores()
    outcome = Outcome(
        "images",
        f"JPEG ({STORED} to {DECODED}) + ViT-B/16 in bf16, one model; a DataLoader of {cores}",
        target=Target(1.0, "alone"),
    )
    files, rows = jpegs(), bench.rows(IMAGE_ROWS, least=2 * IMAGE_BATCH)
    data = pa.table({"image": pa.array([files[i % DISTINCT] for i in range(rows)], pa.binary())})
    table = bench.table(outcome.name, data, 2)
    kind = pa.list_(pa.float32(), IMAGE_WIDTH)
    options = {"batch_size": IMAGE_BATCH, "num_gpus": 1, "cpu_workers": cores}
    function = udf(data_type=kind, **options)(EmbedImages)
    warm(bench, "images_warm", data.slice(0, IMAGE_BATCH), function())
    loader = Loader(files, rows, cores)
    for run in range(bench.repeat):
        outcome.runs.append(timed_backfill(table, f"geneva_{run}", function(), outcome))
        outcome.loop_runs.append(loader.time_epoch())
    return outcome


class Loader:
    """What one would write by hand: a DataLoader around the same decoding, and the same model."""

    def __init__(self, files: list[bytes], rows: int, workers: int) -> None:
        from torch.utils.data import DataLoader

        self.model = ImageModel()
        self.model.setup()
        self.batches = DataLoader(
            Images(files, rows),
            batch_size=IMAGE_BATCH,
            num_workers=workers,
            pin_memory=True,
            persistent_workers=True,
            multiprocessing_context="spawn",
        )
        for number, batch in enumerate(self.batches):  # an epoch: workers start, caches fill
            if number < 4:
                self.model.embed(batch)

    def time_epoch(self) -> float:
        started = time.perf_counter()
        for batch in self.batches:
            self.model.embed(batch)
        return time.perf_counter() - started


# --------------------------------------------------------------------------------------- both


def warm(bench: Bench, name: str, data: pa.Table, function) -> None:
    """Start the slot's own Python process, and load the model there."""
    table = bench.table(name, data, 1)
    table.add_columns({"y": function})
    table.backfill("y")


def timed_backfill(table, column: str, function, outcome: Outcome) -> float:
    table.add_columns({column: function})
    started = time.perf_counter()
    result = table.backfill(column)
    seconds = time.perf_counter() - started
    outcome.metrics = result.progress.metrics()
    return seconds


GPU = (encoder, images)
