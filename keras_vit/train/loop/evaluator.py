"""Evaluation of the weights of a running training."""

from __future__ import annotations

from keras_vit.train.data.sources import Data
from keras_vit.train.loop.state import TrainState
from keras_vit.train.measure.evaluation import evaluate


class Evaluator:
    """Evaluate the moving averages of a state's weights, or without them the weights, on held-out images.

    Args:
        state: that is trained.
        data: evaluated on its held-out images, if it has any.
        is_chief: whether this process evaluates at all.

    Attributes:
        model: copy of the trained model outside of the strategy, with the weights of the last evaluation.
    """

    def __init__(self, state: TrainState, data: Data, *, is_chief: bool) -> None:
        self.model = state.model.rebuilt(state.model.config)
        self._state, self._data = state, data
        has_labels = data.evaluation is not None and state.recipe.objective != "masked_patch"
        self._is_enabled = is_chief and has_labels

    def evaluate(self) -> dict[str, float]:
        """Return "accuracy" and "top5" in [0, 1] and "loss"; nothing where there is nothing to evaluate on."""
        if not self._is_enabled:
            return {}
        self._state.copy_to(self.model)
        found = evaluate(self.model, self._data, labels="real" if self._data.multi_label else "single")
        return {"accuracy": found.top1, "top5": found.top5, "loss": found.loss}
