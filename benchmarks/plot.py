"""Draw how cost grows, from the numbers of `python -m benchmarks growth --json FILE`.

python -m benchmarks.plot FILE PNG        (needs matplotlib)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def draw(results: Path, image: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    outcomes = [
        outcome
        for outcome in json.loads(results.read_text(encoding="utf-8"))["outcomes"]
        if "points" in outcome["metrics"]
    ]
    figure, axes = pyplot.subplots(1, len(outcomes), figsize=(3.2 * len(outcomes), 3.2))
    for axis, outcome in zip(axes, outcomes, strict=True):
        sizes, seconds = zip(*outcome["metrics"]["points"], strict=True)
        axis.loglog(sizes, seconds, "o-", label="measured")
        axis.loglog(sizes, [seconds[0] * n / sizes[0] for n in sizes], "--", label="linear")
        axis.set_title(f"{outcome['name'].removeprefix('growth_')}: {outcome['seconds']:.2f}")
        axis.set_xlabel(outcome["name"].removeprefix("growth_"))
        axis.set_ylabel("seconds")
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.minorticks_off()
        axis.legend()
    figure.tight_layout()
    figure.savefig(image, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
