#!/usr/bin/env bash
# Guess: save(120) after restoring step 100, beside a file of step 200, writes step 120 or raises.
# Fact: orbax-checkpoint 0.12.8 returns False and writes nothing until a step above the latest one comes. The
# manager's latest_step stays 200, the run that was left.
# Why it matters: one goes back because the later steps diverged. The new branch is not saved for 100 steps, and a
# restart after a crash continues from the diverged weights.
# Instead: manager.delete(step) for the later steps first, or another folder; assert what save returns.
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
import os

logging.disable(logging.WARNING)
import jax.numpy as jnp
import orbax.checkpoint as ocp

print("orbax-checkpoint", importlib.metadata.version("orbax-checkpoint"))
with ocp.CheckpointManager(os.path.abspath("run")) as manager:

    def save(step, value):
        return manager.save(step, args=ocp.args.StandardSave({"weights": jnp.full(2, value)}))

    assert save(100, 1.0) and save(200, -1.0)
    manager.wait_until_finished()
    print("restored step 100:", manager.restore(100)["weights"].tolist())
    branch = {step: save(step, 2.0) for step in (120, 150, 200)}
    manager.wait_until_finished()
    print("saved:", branch, "steps:", manager.all_steps(), "latest:", manager.latest_step())
    assert not branch[120] and not branch[150], "older steps are saved now"
    assert list(manager.all_steps()) == [100, 200] and manager.restore(200)["weights"].tolist() == [-1, -1]
    manager.delete(200)
    assert save(120, 2.0)
PY
