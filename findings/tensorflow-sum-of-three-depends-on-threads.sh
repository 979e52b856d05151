#!/usr/bin/env bash
# Guess: after tf.config.experimental.enable_op_determinism() a graph on a CPU returns the same bits every time; a + b + c
# is computed from left to right.
# Fact: in TensorFlow 2.21.0 tf.add_n of three tensors that other operators read too has two results. The sum is written
# over the first tensor whose memory is free at that moment, and begins with it; which one that is depends on threads.
# a + b + c has two results as well: the graph optimizer makes an add_n of it, also through a reshape.
# Why it matters: the gradient of a tensor with three readers (a residual stream) is such a sum. Two runs with one seed
# drift apart from the last digit on, and a resumed run is not the run that was killed.
# Instead: compile the step, or the part with the sum, by XLA (jit_compile=True). With one processor it may not occur.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 tensorflow==2.21.0
cd "$folder"
TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PY'
import numpy as np
import tensorflow as tf

tf.config.experimental.enable_op_determinism()
print("tensorflow", tf.__version__)
random = np.random.default_rng(0)
x = tf.constant(random.normal(size=(2400, 64)).astype("float32"))
kernels = [tf.constant(random.normal(size=(64, 64)).astype("float32")) for _ in range(3)]


def results(add, calls, **options):
    @tf.function(autograph=False, **options)
    def step(x):
        parts = [tf.tanh(x @ kernel) for kernel in kernels]
        return add(parts), [tf.matmul(x, part, transpose_a=True) for part in parts]  # as gradients of kernels

    found = set()
    for number in range(calls):
        found.add(step(x)[0].numpy().tobytes())
        if len(found) > 1:
            return found, number + 1
    return found, calls


summed, calls = results(tf.add_n, 50_000)
added, more = results(lambda parts: parts[0] + parts[1] + parts[2], 50_000)
compiled, _ = results(tf.add_n, 2_000, jit_compile=True)
one, two = (np.frombuffer(result, np.float32) for result in sorted(summed))
print(f"add_n: two results within {calls} calls, at most {abs(one - two).max():.1e} apart")
print(f"a + b + c: {len(added)} results within {more} calls; add_n by XLA: {len(compiled)}")
assert (len(summed), len(added), len(compiled)) == (2, 2, 1)
PY
