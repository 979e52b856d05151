"""Training: recipes as data, one step for every strategy, exact resume, and measuring what came out.

Everything public is imported on first use: recipes and plans need no TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_vit import lazy

if TYPE_CHECKING:
    from keras_vit.train.distribute import strategy
    from keras_vit.train.evaluation import Evaluation, evaluate
    from keras_vit.train.few_shots import few_shot
    from keras_vit.train.loop import Diverged, Result, run
    from keras_vit.train.planner import Plan, plan
    from keras_vit.train.recipe_file import Recipe, recipe, recipes

_HOMES = {
    "Recipe": "recipe_fields",
    "recipe": "recipe_file",
    "recipes": "recipe_file",
    "strategy": "distribute",
    "run": "loop",
    "Result": "loop",
    "Diverged": "loop",
    "evaluate": "evaluation",
    "Evaluation": "evaluation",
    "few_shot": "few_shots",
    "plan": "planner",
    "Plan": "planner",
}

__all__ = [
    "Diverged",
    "Evaluation",
    "Plan",
    "Recipe",
    "Result",
    "evaluate",
    "few_shot",
    "plan",
    "recipe",
    "recipes",
    "run",
    "strategy",
]

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
