"""Run on a GPU what the CPU tests cannot: training steps, two replicas, memory beside the plan, a served model.

    make bench-gpu                                 within 8 minutes; writes benchmarks/results/gpu.txt
    python benchmarks/gpu.py --model Ti/16 --batch 8 --seconds 600

Each row is a new process, so that its memory is its own, and one that fails or takes too long costs no other. Where
TensorFlow finds no GPU it measures the CPU, and JAX measures the GPU if it finds one. The file is written after every
row.
"""

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()
sys.path.insert(0, str(SCRIPT.parents[1]))  # this checkout
RESULTS = SCRIPT.parent / "results" / "gpu.txt"
SECONDS = 470  # of all rows together
ROW_SECONDS = 150  # of one row at most
CLASSES = 1000
Numbers = dict[str, Any]


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Return the median milliseconds of a call, after one that compiles and one more."""
    call(), call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def train_state(options: argparse.Namespace, **changes: Any) -> Any:
    """Return a state of training with AdamW, made in the scope of the current strategy."""
    import keras

    from keras_vit import VisionTransformer, ViTConfig
    from keras_vit.train import Recipe
    from keras_vit.train.objective import supervised
    from keras_vit.train.prepare import adapt_model
    from keras_vit.train.step import TrainState

    recipe = Recipe(
        **{"name": "gpu", "steps": 1000, "batch_size": options.batch, "optimizer": "adamw", "learning_rate": 1e-3},
        **{"clip_norm": 1.0, "schedule": "constant"} | changes,
    )
    keras.utils.set_random_seed(0)
    source = VisionTransformer(ViTConfig.from_name(options.model, image_size=options.size))
    model = adapt_model(recipe, source, num_classes=CLASSES)
    return TrainState(recipe, model, supervised(recipe, model), total_steps=1000)


def batches(options: argparse.Namespace, context: Any = None) -> Any:
    """Return one batch of random images and classes, repeated without end; a part of it for each replica."""
    import tensorflow as tf

    random = tf.random.Generator.from_seed(0)
    image = random.normal((options.batch, options.size, options.size, 3))
    label = tf.one_hot(random.uniform((options.batch,), 0, CLASSES, tf.int32), CLASSES)
    data = tf.data.Dataset.from_tensors({"image": image, "label": label}).repeat()
    replicas = context.num_replicas_in_sync if context else 1
    return data.unbatch().batch(options.batch // replicas, drop_remainder=True) if replicas > 1 else data


def step_function(state: Any, options: argparse.Namespace) -> Callable[[], float]:
    """Return a function that takes one step and returns the loss."""
    import tensorflow as tf

    from keras_vit.train.step import make_train_step

    strategy = state.strategy
    step = make_train_step(state, strategy)
    iterator = iter(strategy.distribute_datasets_from_function(functools.partial(batches, options)))
    return lambda: float(step(iterator, tf.constant(1), tf.constant(0.0))[0])


def train_step(options: argparse.Namespace, precision: str, xla: Any) -> Numbers:
    """Measure a training step, and its memory beside that of the plan."""
    import tensorflow as tf

    from keras_vit import train

    changes = {"precision": precision, "xla": xla}
    milliseconds = timed(step_function(train_state(options, **changes), options), options.repeats)
    planned = train.plan(options.model, batch_size=options.batch, image_size=options.size, precision=precision)
    gpus = tf.config.list_logical_devices("GPU")
    peak = tf.config.experimental.get_memory_info(gpus[0].name.partition("device:")[2])["peak"] if gpus else None
    speed = 1000 * options.batch / milliseconds
    return {"ms": milliseconds, "images/s": speed, "MB": peak and peak / 1e6, "planned MB": planned.total / 1e6}


def replicas(options: argparse.Namespace) -> Numbers:
    """Train three steps on two logical devices of one physical, and on one of them; return the losses' difference."""
    import tensorflow as tf

    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    limit = {"memory_limit": options.memory} if kind == "GPU" else {}
    logical = [tf.config.LogicalDeviceConfiguration(**limit)] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices(kind)[0], logical)
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    # NCCL does not take one physical device twice, and ReductionToOneDevice fails on lists of tensors.
    both = tf.distribute.MirroredStrategy(names, cross_device_ops=tf.distribute.HierarchicalCopyAllReduce())
    losses = {}
    for strategy in (both, tf.distribute.OneDeviceStrategy(names[0])):
        with strategy.scope():
            step = step_function(train_state(options, xla=False), options)
        losses[strategy] = [step() for _ in range(3)]
        milliseconds = timed(step, options.repeats)
        if strategy is both:
            of_both = milliseconds
    together, alone = losses.values()
    difference = max(abs(one - other) / abs(other) for one, other in zip(together, alone, strict=True))
    return {"ms": of_both, "ms, one device": milliseconds, "loss differs by": difference}


def logits(options: argparse.Namespace) -> Numbers:
    """Compare the logits of random weights on the device with those on the CPU."""
    import numpy as np
    import tensorflow as tf

    from keras_vit import VisionTransformer, ViTConfig

    images = tf.random.Generator.from_seed(0).normal((options.batch, options.size, options.size, 3))
    outputs = {}
    for device in ("CPU:0", "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"):
        with tf.device(device):
            tf.keras.utils.set_random_seed(0)
            model = VisionTransformer(ViTConfig.from_name(options.model, image_size=options.size))
            random = np.random.default_rng(0)
            model.set_weights([random.normal(scale=0.05, size=w.shape) for w in model.get_weights()])
            call = tf.function(lambda x, model=model: model(x, training=False))
            outputs[device] = call(images).numpy()
            milliseconds = timed(lambda call=call: call(images).numpy(), options.repeats)
    first, last = list(outputs.values())[0], list(outputs.values())[-1]
    return {"ms": milliseconds, "largest difference": float(np.abs(last - first).max() / np.abs(first).max())}


def saved_model(options: argparse.Namespace) -> Numbers:
    """Export a SavedModel, load it, and measure the signature for prepared images."""
    import numpy as np
    import tensorflow as tf

    from keras_vit import VisionTransformer, ViTConfig, export

    model = VisionTransformer(ViTConfig.from_name(options.model, image_size=options.size))
    with tempfile.TemporaryDirectory() as folder:
        report = export.saved_model(model, Path(folder) / "1")
        loaded = tf.saved_model.load(str(Path(folder) / "1"))
    numbers: Numbers = {"cosine": report.cosine}
    # The signature of prepared images has the model's own input; others take files or uint8 pixels.
    signature = next(
        each
        for each in loaded.signatures.values()
        if [spec.dtype for spec in each.structured_input_signature[1].values()] == [tf.float32]
    )
    (name,) = signature.structured_input_signature[1]
    for count in (1, options.batch):
        images = tf.constant(np.zeros((count, options.size, options.size, 3), np.float32))
        answer = functools.partial(signature, **{name: images})
        numbers[f"ms, {count} images"] = timed(lambda a=answer: next(iter(a().values())).numpy(), options.repeats)
    return numbers


def jax_step(options: argparse.Namespace, dtype: str) -> Numbers:
    """Measure Keras' training step and the model's output on Keras' JAX back end."""
    import keras
    import numpy as np

    from keras_vit import VisionTransformer, ViTConfig

    model = VisionTransformer(ViTConfig.from_name(options.model, image_size=options.size, num_classes=10), dtype=dtype)
    model.compile("adamw", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    images = random.normal(size=(options.batch, options.size, options.size, 3)).astype("float32")
    labels = random.integers(0, 10, options.batch)
    step = timed(lambda: float(np.asarray(model.train_on_batch(images, labels)).ravel()[0]), options.repeats)
    return {"ms": step, "ms, output": timed(lambda: model.predict_on_batch(images), options.repeats)}


ROWS: dict[str, Callable[[argparse.Namespace], Numbers]] = {
    "logits, beside the CPU's": logits,
    "training step, float32": functools.partial(train_step, precision="float32", xla=False),
    "training step, float32, XLA": functools.partial(train_step, precision="float32", xla=True),
    "training step, bfloat16": functools.partial(train_step, precision="mixed_bfloat16", xla=False),
    "training step, bfloat16, XLA": functools.partial(train_step, precision="mixed_bfloat16", xla=True),
    "two replicas on one device": replicas,
    "SavedModel": saved_model,
}
JAX_ROWS: dict[str, Callable[[argparse.Namespace], Numbers]] = {
    "JAX: training step, float32": functools.partial(jax_step, dtype="float32"),
    "JAX: training step, bfloat16": functools.partial(jax_step, dtype="mixed_bfloat16"),
}
DEVICES = {
    "tensorflow": "import tensorflow as tf; print([tf.config.experimental.get_device_details(d).get('device_name', "
    "d.name) for d in tf.config.list_physical_devices('GPU')])",
    "jax": "import jax; print([d.device_kind for d in jax.devices() if d.platform == 'gpu'])",
}


def devices(package: str) -> list[str]:
    """Return the GPUs that a package finds; a new process starts it."""
    if not importlib.util.find_spec(package):
        return []
    done = subprocess.run([sys.executable, "-c", DEVICES[package]], capture_output=True, text=True, env=environment())
    return json.loads(done.stdout.replace("'", '"').splitlines()[-1]) if done.returncode == 0 else []


def environment(row: str = "") -> dict[str, str]:
    """Return the environment of a child."""
    backend = "jax" if row in JAX_ROWS else "tensorflow"
    return os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": backend}


def measured(row: str, options: argparse.Namespace, seconds: float) -> str:
    """Return the numbers of a row as text, or why there are none."""
    command = [sys.executable, str(SCRIPT), "--child", row, "--model", options.model, "--batch", str(options.batch)]
    command += ["--size", str(options.size), "--repeats", str(options.repeats), "--memory", str(options.memory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment(row), timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not finished after {seconds:.0f} s"
    if done.returncode:
        return "failed: " + (done.stderr.strip().splitlines() or ["without a message"])[-1][:300]
    numbers = json.loads(done.stdout.splitlines()[-1])
    return ", ".join(f"{name} {'-' if value is None else format(value, ',.4g')}" for name, value in numbers.items())


def main() -> None:
    """Measure all rows and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--batch", type=int, default=32, help="images, a multiple of two")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--memory", type=int, default=12_000, help="MB of each of two logical GPUs")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all rows")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps({**ROWS, **JAX_ROWS}[options.child](options)))
        return
    end = time.monotonic() + options.seconds
    found, versions = devices("tensorflow"), [f"Python {platform.python_version()}"]
    on_jax = [] if found else devices("jax")
    rows = [*ROWS, *(JAX_ROWS if on_jax else ())]
    if on_jax:  # first what the GPU can do, and then TensorFlow on the CPU as far as time allows
        rows = [*JAX_ROWS, *ROWS]
    for package in ("tensorflow", "keras", "jax"):
        if importlib.util.find_spec(package):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    place = ", ".join(found) or (f"JAX: {', '.join(on_jax)}; TensorFlow: CPU" if on_jax else "CPU, no GPU found")
    lines = [
        f"{options.model} at {options.size} pixels, {options.batch} images, {place}",
        f"{datetime.date.today()}, {', '.join(versions)}; milliseconds are medians of {options.repeats} calls",
        "",
    ]
    for row in rows:
        left = end - time.monotonic()
        text = measured(row, options, min(left, ROW_SECONDS)) if left > 0 else "left out: no time"
        lines.append(f"{row:30} {text}")
        print(lines[-1], flush=True)
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
