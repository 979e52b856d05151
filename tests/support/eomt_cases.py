"""Small models of EoMT with the official outputs, and the comparison of their segments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from places import DATA

FOLDER = DATA / "eomt"
WINDOWS = {"size": {"shortest_edge": 32, "longest_edge": None}, "do_split_image": True}
STUFF = (0, 1, 2)


def with_windows(source: Path, target: Path) -> Path:
    """Copy a model, for images that are cut into windows."""
    shutil.copytree(source, target)
    (target / "preprocessor_config.json").write_text(json.dumps(WINDOWS), encoding="utf-8")
    return target


def check_segments(
    fit: Any, windows: Any, pictures: list[np.ndarray], expected: dict[str, np.ndarray], *, ties: float = 0
) -> None:
    """Compare all segments of all pictures with those of transformers; a share of pixels may be `ties` of float32."""
    for i, picture in enumerate(pictures):
        for kind in ("panoptic", "stuff", "instance"):
            options = {"task": "instance" if kind == "instance" else "panoptic", "threshold": 0.5}
            [found] = fit.predict_segments(picture, **options, stuff_classes=STUFF if kind == "stuff" else ())
            assert (found.ids - 1 != expected[f"{i}/{kind}/ids"]).mean() <= ties  # ours begin with 1
            rows = [(segment.label_id, segment.score) for segment in found.segments]
            tolerance = 0.02 if ties else 1e-5  # one pixel is much of a mask of few pixels
            np.testing.assert_allclose(np.array(rows).reshape(-1, 2), expected[f"{i}/{kind}/rows"], atol=tolerance)
            assert [segment.area for segment in found.segments] == [
                (found.ids == segment.id).sum() for segment in found.segments
            ]
        classes = expected[f"{i}/semantic/ids"]
        assert (windows.predict_maps(picture)[0] != classes).mean() <= ties
        [found] = windows.predict_segments(picture)
        numbers = np.array([segment.label_id for segment in found.segments])
        assert (numbers[found.ids - 1] != classes).mean() <= ties
