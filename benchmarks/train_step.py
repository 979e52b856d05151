"""Measure time and memory of a training step of Ti/16 with keras_vit, Keras' `fit` and PyTorch.

    python benchmarks/train_step.py                        with PyTorch if torch and timm are installed
    python benchmarks/train_step.py --rounds 1 --steps 3 --only torch --only keras_vit
    python benchmarks/train_step.py --only photos          DINOv2-S/14 at 112 pixels, 20 classes: parts of it, LoRA

224 pixels, 1000 classes, batches of 32, AdamW with clipping by the global norm. One batch repeats, so that no step
waits for input. Each measurement is a new process; the rows alternate. Linux only (/proc).
"""

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()
MODEL, TORCH_MODEL, SIZE, CLASSES, BATCH = "Ti/16", "vit_tiny_patch16_224", 224, 1000, 32
PHOTOS, TORCH_PHOTOS, SIZE_PHOTOS = "DINOv2-S/14", "vit_small_patch14_dinov2", 112
RANK = 8  # of LoRA on queries and values
RATE, DECAY, CLIP = 1e-4, 0.05, 1.0
WARM_UP = 2  # steps not timed; the first compiles
THREADS = 2
FLOAT, BFLOAT = "keras_vit", "keras_vit: bfloat16"  # ours with the defaults of recipes: the reference
PLAIN, REMAT = "keras_vit: without XLA", "keras_vit: remat without XLA"
# A function that runs one step and returns the loss; it is built before time and memory are measured.
Step = Callable[[], float]


def batch(size: int, classes: int) -> tuple[Any, Any]:
    """Return random images, float32 (32, size, size, 3), and classes, int64 (32,)."""
    import numpy as np

    rng = np.random.default_rng(0)
    return rng.normal(size=(BATCH, size, size, 3)).astype(np.float32), rng.integers(0, classes, BATCH)


def keras_batches(size: int = SIZE, classes: int = CLASSES) -> Any:
    """Return the batch, repeated without end, as a tf.data.Dataset of images and one-hot labels."""
    import numpy as np
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    images, labels = batch(size, classes)
    tensors = tf.constant(images), tf.constant(np.eye(classes, dtype=np.float32)[labels])
    return tf.data.Dataset.from_tensors(tensors).repeat()


def ours(name: str = MODEL, size: int = SIZE, classes: int = CLASSES, **changes: Any) -> tuple[Step, int]:
    """Return a function that runs one step of keras_vit.train, and the number of parameters that it trains."""
    batches = keras_batches(size, classes)
    import tensorflow as tf

    from keras_vit import zoo
    from keras_vit.train._recipe import Recipe
    from keras_vit.train.objective import supervised
    from keras_vit.train.prepare import adapt_model
    from keras_vit.train.step import TrainState, make_train_step

    rates: dict[str, Any] = {"learning_rate": RATE, "weight_decay": DECAY, "clip_norm": CLIP, "schedule": "constant"}
    recipe = Recipe(name="benchmark", steps=1000, batch_size=BATCH, optimizer="adamw", **rates | changes)
    source = zoo.load(name, weights=None, image_size=size)
    model = adapt_model(recipe, source, num_classes=classes)
    state = TrainState(recipe, model, supervised(recipe, model), total_steps=1000)
    train_step = make_train_step(state, tf.distribute.get_strategy())
    named = batches.map(lambda image, label: {"image": image, "label": label})
    iterator = iter(named)
    one, go_on = tf.constant(1), tf.constant(0.0)
    count = sum(math.prod(variable.shape) for variable in state.trained)
    return lambda: float(train_step(iterator, one, go_on)[0]), count


def fit(jit_compile: Any = "auto", dtype: str = "float32") -> tuple[Step, int]:
    """Return the same for Keras' `fit`, which runs in a thread and waits after every step."""
    batches = keras_batches()
    import keras

    from keras_vit.model.config import ViTConfig
    from keras_vit.model.vision_transformer import VisionTransformer

    model = VisionTransformer(ViTConfig.from_name(MODEL), dtype=dtype)
    optimizer = keras.optimizers.AdamW(RATE, weight_decay=DECAY, epsilon=1e-8, global_clipnorm=CLIP)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta", "embedding", "token"])
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"], jit_compile=jit_compile)
    return functools.partial(next, steps_of_fit(model, batches)), model.count_params()


def steps_of_fit(model: Any, batches: Any) -> Iterator[float]:
    """Pass on the loss after each step; `fit` continues when the next one is requested."""
    import threading

    import keras

    class Turns(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.go, self.done, self.loss = threading.Semaphore(0), threading.Semaphore(0), 0.0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.go.acquire()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.loss = float(logs["loss"])
            self.done.release()

    turns = Turns()
    endless = {"steps_per_epoch": 10**6, "verbose": 0, "callbacks": [turns]}
    threading.Thread(target=model.fit, args=(batches,), kwargs=endless, daemon=True).start()
    while True:
        turns.go.release()
        turns.done.acquire()
        yield turns.loss


def torch(compiled: bool = False, bfloat16: bool = False) -> tuple[Step, int]:
    """Return the same for a usual training loop in PyTorch, with timm's model of the same architecture."""
    import timm
    import torch

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    images, classes = (torch.from_numpy(array) for array in batch(SIZE, CLASSES))
    images = images.permute(0, 3, 1, 2).contiguous()
    model = timm.create_model(TORCH_MODEL, act_layer="gelu_tanh").train()
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim > 1 and p is not model.pos_embed and p is not model.cls_token]
    others = [p for p in parameters if all(p is not matrix for matrix in matrices)]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    forward = torch.compile(model) if compiled else model

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
            logits = forward(images)
        loss = torch.nn.functional.cross_entropy(logits.float(), classes)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return float(loss.detach())

    return step, sum(p.numel() for p in parameters)


def torch_photos(part: str) -> tuple[Step, int]:
    """Return the same for timm's DINOv2-S/14 at 112 pixels, of which only a part and the head are trained."""
    import timm
    import torch

    class LoRA(torch.nn.Module):
        """The layer qkv of a block, and updates of queries and values."""

        def __init__(self, qkv: Any) -> None:
            super().__init__()
            self.qkv, width = qkv, qkv.in_features
            self.down = torch.nn.ModuleList(torch.nn.Linear(width, RANK, bias=False) for _ in range(2))
            self.up = torch.nn.ModuleList(torch.nn.Linear(RANK, width, bias=False) for _ in range(2))

        def forward(self, x: Any) -> Any:
            query, value = (up(down(x)) for up, down in zip(self.up, self.down, strict=True))
            return self.qkv(x) + torch.cat((query, torch.zeros_like(query), value), -1)

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    images, classes = (torch.from_numpy(array) for array in batch(SIZE_PHOTOS, 20))
    images = images.permute(0, 3, 1, 2).contiguous()
    model = timm.create_model(TORCH_PHOTOS, img_size=SIZE_PHOTOS, num_classes=20).train()
    for block in model.blocks if part == "LoRA" else ():
        block.attn.qkv = LoRA(block.attn.qkv)
    words = {"everything": "", "norms and biases": r"norm|bias|gamma|^head", "LoRA": r"\.down|\.up|^head"}[part]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(re.search(words, name)))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(images), classes)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return float(loss.detach())

    return step, sum(p.numel() for p in parameters)


# Name: the function that makes the step, and whether it computes in bfloat16.
CONTENDERS: dict[str, tuple[Callable[[], tuple[Step, int]], bool]] = {
    FLOAT: (ours, False),
    "keras_vit: all XLA": (functools.partial(ours, xla=True), False),
    PLAIN: (functools.partial(ours, xla=False), False),
    "keras_vit: remat": (functools.partial(ours, remat=True), False),
    "keras_vit: remat, all XLA": (functools.partial(ours, xla=True, remat=True), False),
    REMAT: (functools.partial(ours, xla=False, remat=True), False),
    "fit": (fit, False),
    "fit: jit_compile=True": (functools.partial(fit, jit_compile=True), False),
    "torch: eager": (torch, False),
    "torch: compile": (functools.partial(torch, compiled=True), False),
    BFLOAT: (functools.partial(ours, precision="mixed_bfloat16"), True),
    "keras_vit: bfloat16, all XLA": (functools.partial(ours, xla=True, precision="mixed_bfloat16"), True),
    "keras_vit: bfloat16 without XLA": (functools.partial(ours, xla=False, precision="mixed_bfloat16"), True),
    "fit: bfloat16": (functools.partial(fit, dtype="mixed_bfloat16"), True),
    "torch: eager bfloat16": (functools.partial(torch, bfloat16=True), True),
    "torch: compile bfloat16": (functools.partial(torch, compiled=True, bfloat16=True), True),
}
# Part of the model that is trained beside the head: fields of the recipe.
PARTS: dict[str, dict[str, Any]] = {
    "everything": {},
    "norms and biases": {"train_only": ("norms", "biases")},
    "LoRA": {"lora_rank": RANK},
}
for part, fields in PARTS.items():
    of_part = functools.partial(ours, PHOTOS, SIZE_PHOTOS, 20, **fields)
    CONTENDERS |= {f"photos: {part}": (of_part, False)}
    CONTENDERS |= {f"torch: photos: {part}": (functools.partial(torch_photos, part), False)}
recomputed = functools.partial(ours, PHOTOS, SIZE_PHOTOS, 20, remat=True, **PARTS["norms and biases"])
CONTENDERS["photos: norms and biases, remat"] = (recomputed, False)
# Target: how many times as fast ours should be as the other.
TARGETS = [(FLOAT, "torch: eager", 1.05), (FLOAT, "fit", 1.1)]
TARGETS += [(BFLOAT, "torch: eager bfloat16", 1.05), (BFLOAT, "fit: bfloat16", 1.1)]
TARGETS += [(f"photos: {part}", f"torch: photos: {part}", 1.0) for part in PARTS]
DISTURBED = 0.2  # mean number of processors that other programs may use; above it no target of time is judged
MEMORY_TARGET = 0.55  # memory with remat, as a share of the memory without


def memory(name: str) -> int:
    """Return the resident bytes of this process: now ("VmRSS") or at the peak ("VmHWM")."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].removesuffix("kB")) * 1024


def worked() -> float:
    """Return the busy seconds of all processors, for all processes of the machine."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def measure(name: str, steps: int) -> None:
    """Run the steps of one row in this process alone, and print the figures as JSON."""
    step, parameters = CONTENDERS[name][0]()
    before = memory("VmRSS")
    start = time.perf_counter()
    losses = [step()]
    first = time.perf_counter() - start
    losses += [step() for _ in range(WARM_UP - 1)]
    all_work, cpu, ends = worked(), time.process_time(), [time.perf_counter()]
    for _ in range(steps):
        losses.append(step())
        ends.append(time.perf_counter())
    cpu, all_work = time.process_time() - cpu, worked() - all_work
    figures = {
        "seconds": [end - begin for begin, end in itertools.pairwise(ends)],
        "cpu": cpu / steps,
        "others": max(0.0, all_work - cpu) / (ends[-1] - ends[0]),
        "first": first,
        "peak": memory("VmHWM"),
        "added": memory("VmHWM") - before,
        "parameters": parameters,
        "losses": losses,
    }
    print(json.dumps(figures), flush=True)
    os._exit(0)  # `fit` still waits in its thread


def measured(name: str, steps: int) -> dict[str, Any] | str:
    """Return the figures of a new process, or the reason for a failure."""
    given = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "OMP_NUM_THREADS": str(THREADS)}
    given |= {"PYTHONPATH": str(SCRIPT.parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--child", name, "--steps", str(steps)]
    ended = subprocess.run(command, env=os.environ | given, capture_output=True, text=True)
    if ended.returncode:
        reason = ended.stderr.strip().splitlines()[-1:] or [f"it ended with {ended.returncode}"]
        return reason[0] if name.startswith("torch") else sys.exit(f"no success with {name}\n{ended.stderr}")
    row: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    if not min(row["losses"][1:]) < row["losses"][0]:
        sys.exit(f"{name} does not learn the one batch it is shown: losses {row['losses']}")
    return row


def chosen(only: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the rows that can run, and the others with the reason."""
    names = [name for name in CONTENDERS if not only or any(part in name for part in only)]
    missing = [package for package in ("torch", "timm") if importlib.util.find_spec(package) is None]
    left_out = {name: f"{' and '.join(missing)} not installed" for name in names if missing and "torch" in name}
    return [name for name in names if name not in left_out], left_out


def times(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """Return the ratio of two times: the median of the ratios in each round."""
    medians = ([statistics.median(row["seconds"]) for row in rows] for rows in (one, other))
    return statistics.median(a / b for a, b in zip(*medians, strict=True))


def report(results: dict[str, list[dict[str, Any]]], left_out: dict[str, str], steps: int) -> None:
    """Print the machine and the versions, the table and the targets."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    packages = ("tensorflow", "keras", "numpy", "torch", "timm")
    versions = [f"{p} {importlib.metadata.version(p)}" for p in packages if importlib.util.find_spec(p)]
    rounds = len(next(iter(results.values())))
    only_photos = all("photos" in name for name in results)
    model, size = (PHOTOS, SIZE_PHOTOS) if only_photos else (MODEL, SIZE)
    print(
        f"A training step of {model} at {size}, batch {BATCH}, AdamW, clipped: {rounds} fresh processes each of {steps}"
    )
    print(f"steps, after {WARM_UP} that are not timed; {THREADS} threads. {datetime.date.today()}, ", end="")
    print(f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} CPUs,")
    print(f"shared with others: a load of {os.getloadavg()[2]:.1f} over fifteen minutes, this included")
    print(f"Python {platform.python_version()}, {', '.join(versions)}")
    columns = ("median", "best", "CPU", "x ours", "x best", "others", "first s", "peak MB", "added MB")
    print(f"\n{'ms a step':30}" + "".join(f"{column:>9}" for column in columns))
    for name, rows in results.items():
        reference = name.removeprefix("torch: ") if "photos" in name else BFLOAT if CONTENDERS[name][1] else FLOAT
        print(line(name, rows, results.get(reference)))
    print(f"\nx ours: its time in that of {FLOAT!r}, in bfloat16 of {BFLOAT!r}; median of the rounds' ratios")
    print(f"photos: {PHOTOS} at {SIZE_PHOTOS}, 20 classes, the head and a part trained; x ours: of the same part")
    print(
        "others: processors that other programs took meanwhile; PyTorch's threads wait for each other and suffer most"
    )
    print("x best: the same of the best steps. first s: the first step, with compiling")
    print("peak MB: the most that was resident; added MB: over what was when model, optimizer and batch stood ready,")
    print("before the first step; compiling is in both")
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    verdicts(results)


def line(name: str, rows: list[dict[str, Any]], reference: list[dict[str, Any]] | None) -> str:
    """Return one line of the table; comparisons are "-" if our row is missing."""
    best, of_reference = (
        min((second for row in them for second in row["seconds"]), default=0.0) for them in (rows, reference or [])
    )
    ratios = (times(rows, reference), best / of_reference) if reference else None
    middle = {key: statistics.median(row[key] for row in rows) for key in ("cpu", "others", "first", "peak", "added")}
    median = statistics.median(second for row in rows for second in row["seconds"])
    figures = f"{median * 1e3:9.0f}{best * 1e3:9.0f}{middle['cpu'] * 1e3:9.0f}"
    figures += "".join(f"{ratio:8.2f}x" for ratio in ratios) if ratios else f"{'-':>9}{'-':>9}"
    figures += f"{middle['others']:9.2f}{middle['first']:9.1f}"
    return f"{name:30}{figures}{middle['peak'] / 1e6:9.0f}{middle['added'] / 1e6:9.0f}"


def verdicts(results: dict[str, list[dict[str, Any]]]) -> None:
    """Print every target of which both rows ran."""
    print()
    for mine, other, least in TARGETS:
        if mine in results and other in results:
            ratio = times(results[other], results[mine])
            others = max(statistics.median(row["others"] for row in results[name]) for name in (mine, other))
            verdict = "not judged, others took processors" if others > DISTURBED else met(ratio >= least)
            print(f"{mine} is {ratio:.2f}x as fast as {other} (target: {least}x): {verdict}")
    if PLAIN in results and REMAT in results:
        of = {key: [statistics.median(r[key] for r in results[n]) for n in (REMAT, PLAIN)] for key in ("peak", "added")}
        peak, added = (with_it / without for with_it, without in of.values())
        words = f"{peak:.2f}x the peak of {PLAIN}, {added:.2f}x of what is added"
        print(f"{REMAT}: {words} (target: peak {MEMORY_TARGET}x): {met(peak <= MEMORY_TARGET)}")


def met(whether: bool) -> str:
    """Return the verdict that is printed after a target."""
    return "met" if whether else "MISSED"


def main() -> None:
    """Read the command line; run the comparison, or one row as its child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed, in each process")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PART", help="contenders with this in their name"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return measure(options.child, options.steps)
    names, left_out = chosen(options.only)
    if not names:
        parser.error(f"--only: nothing of {list(CONTENDERS)} can run: {left_out or options.only}")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    order = random.Random(0)
    for turn in range(options.rounds):
        for name in order.sample(names, len(names)):
            if name in left_out:
                continue
            row = measured(name, options.steps)
            if isinstance(row, str):
                left_out[name] = row
                continue
            results[name].append(row)
            print(f"round {turn}: {name} {statistics.median(row['seconds']) * 1e3:.0f} ms", file=sys.stderr)
    results = {name: rows for name, rows in results.items() if name not in left_out}
    counts = {name: rows[0]["parameters"] for name, rows in results.items()}
    for kind in ("photos: everything", "photos: norms and biases", ""):  # Keras' LoRA is (384, 6, 8) by (8, 64)
        same = {name: count for name, count in counts.items() if (kind in name if kind else "photos" not in name)}
        if len(set(same.values())) > 1:
            sys.exit(f"The numbers of trained parameters differ: {same}")
    report(results, left_out, options.steps)
    return None


if __name__ == "__main__":
    main()
