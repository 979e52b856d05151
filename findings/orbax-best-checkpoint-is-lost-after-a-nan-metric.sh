#!/usr/bin/env bash
# Guess: CheckpointManager with best_fn keeps the best steps; a NaN is the worst, or is refused.
# Fact: orbax-checkpoint 0.12.8 sorts by the metric, and NaN breaks the order. Of accuracies 0.5, NaN, 0.9, 0.1, NaN,
# 0.7 with max_to_keep=2 it keeps a NaN and 0.7, calls 0.7 the best and deletes 0.9. Without the NaN it keeps 0.9.
# Why it matters: one diverged evaluation, or an average over an empty fold, costs the best weights of the run.
# Instead: let best_fn return -inf (for 'min' inf) when the metric is not finite.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import importlib.metadata
import logging
import math
import os

logging.disable(logging.WARNING)
import jax.numpy as jnp
import orbax.checkpoint as ocp

print("orbax-checkpoint", importlib.metadata.version("orbax-checkpoint"))
accuracies = [0.5, math.nan, 0.9, 0.1, math.nan, 0.7]


def kept(name, best_fn):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=best_fn, best_mode="max")
    with ocp.CheckpointManager(os.path.abspath(name), options=options) as manager:
        for step, accuracy in enumerate(accuracies):
            manager.save(step, args=ocp.args.StandardSave({"x": jnp.ones(1)}), metrics={"accuracy": accuracy})
        manager.wait_until_finished()
        return [accuracies[step] for step in manager.all_steps()], accuracies[manager.best_step()]


plain = kept("plain", lambda metrics: metrics["accuracy"])
finite = kept("finite", lambda metrics: -math.inf if math.isnan(metrics["accuracy"]) else metrics["accuracy"])
print(f"accuracies {accuracies}: kept {plain[0]}, best {plain[1]}; with NaN as -inf kept {finite[0]}, best {finite[1]}")
assert 0.9 not in plain[0] and plain[1] == 0.7, "NaN no longer hides the best step"
assert 0.9 in finite[0] and finite[1] == 0.9
PY
