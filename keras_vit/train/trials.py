"""Train with several values of a recipe's fields, each in its own folder, and compare the runs."""

import dataclasses
import gc
import hashlib
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_vit._util.checks import as_python
from keras_vit._util.progress import print_line
from keras_vit.errors import DivergedError
from keras_vit.train import prepare, strategies
from keras_vit.train._recipe import Recipe
from keras_vit.train._recipe import recipe as load_recipe
from keras_vit.train._run import Request, carry_out
from keras_vit.train.checkpoints import plain_path
from keras_vit.train.data.sources import DataRequest, open_data
from keras_vit.train.held_out import Best, cannot_evaluate, rank


@dataclass(frozen=True)
class Trials:
    """The runs of `try_values`; `print` shows them as a table, the best first.

    Args:
        finished: the best evaluation of each run, by the run's folder; None for a run that diverged.
        count: number of all runs; after a signal fewer are finished, and the same call does the others.

    Example:
        >>> best = keras_vit.train.Best(step=20, metrics={"accuracy": 0.5, "loss": 1.0}, path="x/seed=1/best.keras")
        >>> print(keras_vit.train.Trials({"x/seed=1": best}, count=1))
        seed=1  accuracy 0.5000, loss 1.0000
        best: x/seed=1/best.keras
    """

    finished: dict[str, Best | None]
    count: int

    @property
    def best(self) -> Best | None:
        """The evaluation with the highest accuracy, and among equals the lowest loss; None if no run has any."""
        return max(filter(None, self.finished.values()), key=lambda best: rank(best.metrics), default=None)

    def __str__(self) -> str:
        found = sorted(self.finished.items(), key=lambda item: rank(item[1].metrics) if item[1] else (), reverse=True)
        rows = {folder.rpartition("/")[2]: _figures(best) for folder, best in found}
        lines = [f"{name:{max(map(len, rows))}}  {text}" for name, text in rows.items()]
        lines += [f"best: {self.best.path}"] if self.best else []
        if len(found) < self.count:
            lines.append(f"Stopped: {len(found)} of {self.count} runs are finished. The same command does the others.")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Convert to values that JSON can hold.

        Example:
            >>> keras_vit.train.Trials({}, count=4).to_dict()
            {'finished': {}, 'count': 4, 'best': None}
        """
        return dataclasses.asdict(self) | {"best": self.best and self.best.path}


def _figures(best: Best | None) -> str:
    names = [next(iter(best.metrics)), "loss"] if best else []
    return ", ".join(f"{name} {best.metrics[name]:.4f}" for name in names) if best else "diverged"


def try_values(
    recipe: Recipe | str | os.PathLike[str],
    values: Mapping[str, Any],
    *,
    model: Any,
    data: Any,
    out: str | os.PathLike[str],
    **options: Any,
) -> Trials:
    """Train with each value of a recipe's fields, or each combination, and compare the runs on the held-out images.

    The same call continues after an interruption; runs that are finished are evaluated again, and not trained.

    Args:
        recipe: as for `train.run`.
        values: fields of the recipe and lists of their values, such as {"learning_rate": [0.001, 0.003]}.
        model: as for `train.run`.
        data: as for `train.run`; images must be held out.
        out: folder with a folder for each run, such as `out/learning_rate=0.001`.
        **options: other arguments of `train.run`, except `changes` and `continue_from`.

    Raises:
        ValueError: A value is not valid, or no images are held out; before the first run.

    Example:
        >>> recipe = keras_vit.train.recipe("finetune-digits", steps=1, batch_size=8, image_size=None, xla=False)
        >>> rates = {"learning_rate": [0.001, 0.01]}
        >>> trials = keras_vit.train.try_values(recipe, rates, model="digits", data="digits", out="x", progress=False)
        >>> list(trials.finished)
        ['x/learning_rate=0.001', 'x/learning_rate=0.01']
    """
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    runs, fields = _grid(chosen, values), {each.name for each in dataclasses.fields(DataRequest)}
    asked = DataRequest(data=data, **{name: options.pop(name) for name in fields & options.keys()})
    request = Request(chosen, model, asked, **options)
    devices = strategies.strategy(request.strategy) if isinstance(request.strategy, str) else request.strategy
    opened = open_data(dataclasses.replace(asked, has_single_class=chosen.objective == "sigmoid"))
    source = prepare.choose_model(chosen, model, request.weights)
    if reason := next(filter(None, (cannot_evaluate(one, opened) for one in runs.values())), None):
        raise ValueError(f"Runs are compared on held-out images. {reason}")
    prepare.check_variants(chosen, [*runs.values()], source, opened, devices)
    show = print_line if request.progress and strategies.is_chief(devices) else lambda _: None
    show(f"runs: {len(runs)}, each in a folder of {out}")
    finished: dict[str, Best | None] = {}
    for number, (name, one) in enumerate(runs.items(), 1):
        folder = f"{plain_path(out)}/{name}"
        show(f"run {number} of {len(runs)}: {name}")
        try:
            result = carry_out(dataclasses.replace(request, recipe=one, out=folder, strategy=devices))
        except DivergedError as error:  # other values may be good
            show(f"{name}: {error}")
            finished[folder] = None
            continue
        if result.stopped:
            break
        finished[folder] = result.best or Best(result.steps, result.metrics, f"{folder}/model.keras")
        del result
        gc.collect()  # models have references in circles
    return Trials(finished, len(runs))


def _grid(recipe: Recipe, values: Mapping[str, Any]) -> dict[str, Recipe]:
    """Change the recipe to each combination of values; return the recipes by the names of their folders."""
    columns = {name: as_python(column) for name, column in values.items()}
    if not columns or not all(isinstance(column, tuple) and column for column in columns.values()):
        raise ValueError(f"values must be a list of values to try for each field. Received: {values!r:.200}")
    found = [recipe.replace(**dict(zip(columns, each, strict=True))) for each in itertools.product(*columns.values())]
    runs = {",".join(f"{field}={_file_name(str(getattr(one, field)))}" for field in columns): one for one in found}
    if len(runs) < len(found):
        raise ValueError(f"The values to try must differ. Received: {values!r:.200}")
    return runs


def _file_name(text: str) -> str:
    """Make a text a part of a file name on every system; a hash tells those apart that differ in other characters."""
    safe = re.sub(r"[^A-Za-z0-9.+-]+", "-", text)[:40].strip("-")
    return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
