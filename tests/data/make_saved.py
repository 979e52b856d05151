"""Write tests/data/saved: one small model in every format of its own, and a training run interrupted at half.

    python tests/data/make_saved.py

The files in the folder were written by commit 2a7730a, the last one before the package was divided into folders.
They are never written again: tests/test_saved_files.py shows that files of earlier versions still load.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "saved"
sys.path.append(str(FOLDER.parents[1]))

import keras_vit  # noqa: E402
from keras_vit import converters, train  # noqa: E402
from saved_run import CONFIG, FIELDS, HALF  # noqa: E402
from tiny_models import prepared, randomised  # noqa: E402


def main() -> None:
    """Write the model, its outputs, and the run."""
    model = randomised(keras_vit.VisionTransformer(CONFIG))
    model.save(FOLDER / "model.keras")
    model.save_weights(FOLDER / "model.weights.h5")
    converters.save(model, FOLDER / "model.npz", format="google")
    np.savez_compressed(FOLDER / "outputs.npz", logits=np.asarray(model(prepared(CONFIG))))
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        recipe, model = train.recipe("digits", **FIELDS), keras_vit.VisionTransformer(CONFIG)
        result = train.run(recipe, model=model, data="digits", out=run)
        np.savez_compressed(FOLDER / "ended.npz", **{v.path: v.numpy() for v in result.model.weights})
        kept = FOLDER / "run"
        shutil.rmtree(kept, ignore_errors=True)
        step = f"checkpoints/step-{HALF:08d}"
        shutil.copytree(run / step, kept / step)
        lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
        (kept / "log.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= HALF))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
