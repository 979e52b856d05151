"""Compare CLIP-B/16's text tower (63 million random weights) with Keras Hub's: time, memory, same results.

    python benchmarks/text.py

Keras Hub is measured if it is installed. Every model runs in a process of its own, and the processes alternate.
"""

import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
WHO = ("keras_vit", "keras_hub")
SIZES = {"vocab_size": 49408, "hidden": 512, "layers": 12, "heads": 8, "mlp": 2048, "length": 77}
ROUNDS, CALLS = 3, 7


def build(who: str) -> Any:
    """Return the tower, random, with ids (batch, 77) as its input."""
    if who == "keras_vit":
        from keras_vit import text

        return text.TextEncoder(text.TextConfig())
    from keras_hub.models import CLIPTextEncoder

    return CLIPTextEncoder(
        vocabulary_size=SIZES["vocab_size"],
        embedding_dim=SIZES["hidden"],
        hidden_dim=SIZES["hidden"],
        num_layers=SIZES["layers"],
        num_heads=SIZES["heads"],
        intermediate_dim=SIZES["mlp"],
        max_sequence_length=SIZES["length"],
    )


def measure(who: str) -> None:
    """Print parameters, milliseconds of 1 and of 32 texts, and peak memory above that of the imports, in MB."""
    import keras
    import tensorflow as tf

    if who == "keras_hub":
        import keras_hub  # noqa: F401
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    keras.utils.set_random_seed(0)
    model = build(who)
    ids = np.random.default_rng(0).integers(1, 49000, (32, SIZES["length"])).astype(np.int32)
    ids[:, -1] = 49407
    function = tf.function(lambda x: model(x if who == "keras_vit" else {"token_ids": x}, training=False))
    figures = []
    for batch in (1, 32):
        given = tf.constant(ids[:batch])
        function(given)
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            function(given)
            times.append(time.perf_counter() - start)
        figures.append(1000 * statistics.median(times))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print("figures", model.count_params(), *figures, peak)


def main() -> None:
    """Print the medians of all rounds."""
    installed = [who for who in WHO if importlib.util.find_spec(who)]
    found: dict[str, list[list[float]]] = {who: [] for who in installed}
    for _ in range(ROUNDS):
        for who in installed:
            result = subprocess.run([sys.executable, __file__, who], capture_output=True, text=True, check=True)
            line = next(line for line in result.stdout.splitlines() if line.startswith("figures"))
            found[who].append([float(value) for value in line.split()[1:]])
    print(f"{'':<10} {'parameters':>12} {'1 text':>9} {'32 texts':>10} {'memory':>8}")
    for who, rounds in found.items():
        parameters, one, many, peak = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{who:<10} {parameters:>12,.0f} {one:>6.1f} ms {many:>7.0f} ms {peak:>5.0f} MB")


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
