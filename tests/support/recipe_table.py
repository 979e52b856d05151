"""Write the table of recipes into docs/pre-train-and-self-supervise.md.

python tests/support/recipe_table.py
"""

from __future__ import annotations

from keras_vit import train
from places import ROOT

PAGE = ROOT / "docs" / "pre-train-and-self-supervise.md"
START = "<!-- recipes: written by tests/support/recipe_table.py, checked by make test -->\n"
END = "<!-- /recipes -->"
HEADER = ("recipe", "begins", "optimizer, peak rate", "decay", "clip", "schedule, warm-up", "batch", "length", "pixels")


def rendered() -> str:
    """Return the table in Markdown."""
    lines = [HEADER, ["---"] * len(HEADER), *(_cells(train.recipe(name)) for name in train.recipes())]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(recipe: train.Recipe) -> list[str]:
    pixels = "the model's" if recipe.image_size is None else str(recipe.image_size)
    if recipe.optimizer == "least_squares":
        return [f"`{recipe.name}`", recipe.start, "least squares", *"----", "each image once", pixels]
    loss = "" if recipe.objective == "softmax" else f", {recipe.objective.replace('_', ' ')}"
    rate = f"{recipe.learning_rate:g}"
    independent = ", independent" if recipe.weight_decay_independent else ""
    warmup = f"{recipe.warmup_fraction:.0%}" if recipe.warmup_steps is None else f"{recipe.warmup_steps:,}"
    return [
        f"`{recipe.name}`",
        f"{recipe.start}{loss}",
        f"{ {'sgd': 'SGD', 'adamw': 'AdamW'}[recipe.optimizer] } {rate}",
        f"{recipe.weight_decay:g}{independent}" if recipe.weight_decay else "-",
        "-" if recipe.clip_norm is None else f"{recipe.clip_norm:g}",
        f"{recipe.schedule}, {warmup}",
        f"{recipe.batch_size:,}",
        f"{recipe.epochs:g} epochs" if recipe.steps is None else f"{recipe.steps:,} steps",
        pixels,
    ]


def main() -> None:
    """Replace the table in the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(before + START + rendered() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
