"""Train models by recipes, on any devices, with exact resume; evaluate them, and plan the memory of a step.

Public names are imported on first use: recipes need no TensorFlow.
"""

from typing import TYPE_CHECKING

from keras_vit._util import lazy

if TYPE_CHECKING:
    from keras_vit.errors import DivergedError
    from keras_vit.train._recipe import Recipe, recipe, recipes
    from keras_vit.train.loop.held_out import Best
    from keras_vit.train.loop.run import Result, run
    from keras_vit.train.measure.evaluation import Evaluation, evaluate
    from keras_vit.train.measure.examination import Examination, examine
    from keras_vit.train.measure.few_shots import few_shot
    from keras_vit.train.measure.planner import Plan, plan
    from keras_vit.train.step.strategies import strategy

_NAMES = {
    "_recipe": ("Recipe", "recipe", "recipes"),
    "keras_vit.errors": ("DivergedError",),
    "loop.held_out": ("Best",),
    "loop.run": ("Result", "run"),
    "measure.evaluation": ("Evaluation", "evaluate"),
    "measure.examination": ("Examination", "examine"),
    "measure.few_shots": ("few_shot",),
    "measure.planner": ("Plan", "plan"),
    "step.strategies": ("strategy",),
}

__all__ = [
    "Best",
    "DivergedError",
    "Evaluation",
    "Examination",
    "Plan",
    "Recipe",
    "Result",
    "evaluate",
    "examine",
    "few_shot",
    "plan",
    "recipe",
    "recipes",
    "run",
    "strategy",
]

__getattr__, __dir__ = lazy.lazy_names(__name__, _NAMES)
