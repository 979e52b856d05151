"""What a training run comes to: a result, or an end before it."""

from __future__ import annotations

from dataclasses import dataclass

from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train._recipe import Recipe


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Args:
        model: with the final weights (their moving averages where the recipe asks for them), outside of any strategy;
            after masked_patch the encoder, without a head.
        recipe: as it was carried out.
        metrics: of the evaluation at the end: "accuracy", "top5", "loss"; empty where there is nothing to evaluate on.
        history: what was logged in this process: dicts with "step" and figures.
        steps: done in all.
        images_per_second: while training, in this process.
        skipped: training images left out because they cannot be decoded.
        out: the folder with the model, log and checkpoints; None where none was asked for, or another worker writes.
        stopped: whether a signal ended the run early; the same call goes on from there.
    """

    model: VisionTransformer
    recipe: Recipe
    metrics: dict[str, float]
    history: list[dict[str, float]]
    steps: int
    images_per_second: float
    skipped: int
    out: str | None
    stopped: bool
