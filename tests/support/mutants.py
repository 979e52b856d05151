"""Put small faults into a copy of the package, one at a time, and see which the tests find: ten in each of four parts.

python tests/support/mutants.py [--only ID ...] [--out FILE] [--seconds N] [--rest]

The likeliest test files run first (`make test`'s tests, then those of `make test-full`), with --rest all others of
`make test` after them. A fault is found if a test fails that passes without it. FILE keeps the results: the next call
runs what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from places import ROOT

QUICK = "not (full or slow or torch or jax or peers or browser or gpu or arm or real or network)"
FULL = QUICK.replace("not (full or", "full and not (")
FOUND, NONE_COLLECTED = (1, 2), 5  # exit codes of pytest; 2 is an error while it collects
NOT_RUN = "not run"


class Fault(NamedTuple):
    """A fault: in the `change`, which a file has once, @@old@@new@@. The likeliest tests lack "test_" and ".py"."""

    id: str
    path: str
    change: str
    breaks: str
    tests: str

    @property
    def old(self) -> str:
        """The text of the file."""
        return re.sub("@@(.*?)@@(.*?)@@", r"\1", self.change, flags=re.DOTALL)

    @property
    def new(self) -> str:
        """The text with the fault."""
        return re.sub("@@(.*?)@@(.*?)@@", r"\2", self.change, flags=re.DOTALL)


# fmt: off
FAULTS = [Fault(*row) for row in (
    ("c1", "converters/checkpoints/timm.toml", '"attn_pool.kv.weight | part @@1@@0@@ of 2"',
     "timm's attention pooling reads the keys' kernel as the values'", "formats format_matrix timm_variants"),
    ("c2", "converters/checkpoints/google.toml", "norm_epsilon = 1e-@@6@@5@@\nfinal_norm",
     "epsilon of the norms of Google's files", "google_families formats families"),
    ("c3", "keras_vit/converters/config_json.py", "        if stated != @@known[name]@@stated@@:",
     "a config.json may contradict the tensors", "forged_files keras_hub timm_variants"),
    ("c4", "keras_vit/converters/table.py", "4: (@@2, 3@@3, 2@@, 1, 0)",
     "rows and columns of PyTorch's patches are swapped", "formats format_matrix timm_variants"),
    ("c5", "keras_vit/converters/loading.py", "np.isfinite(value).@@all@@any@@())",
     "a NaN among the weights is loaded without a word", "forged_files"),
    ("c6", "keras_vit/converters/json_towers.py", "(@@-@@@@offset / scale, 1 / scale)",
     "sign of the mean in Keras Hub's image_converter.json", "keras_hub formats family_abilities"),
    ("c7", "keras_vit/converters/json_configs.py",
     '"image_mean": per_channel(ours.@@mean@@std@@, config),\n'
     '        "image_std": per_channel(ours.@@std@@mean@@, config)',
     "mean and std are swapped in a written preprocessor_config.json", "saving families forged_files"),
    ("c8", "keras_vit/converters/saving.py", "token @@+@@-@@ table[:, start:end]",
     "sign of the position row that is moved into the class token", "saving format_matrix"),
    ("c9", "keras_vit/converters/loading.py", "            value @@= value @@@@+ checkpoint.container",
     "the class token lacks its row of the position embedding", "formats format_matrix timm_variants families"),
    ("c10", "keras_vit/converters/saving.py", "@@merged.get(id(value), value)@@value@@",
     "a saved checkpoint lacks LoRA's updates", "family_abilities pieces plain_keras"),
    ("m1", "keras_vit/model/vit.py", "c.stochastic_depth * @@i / max(1, c.num_layers - 1)@@(i + 1) / c.num_layers@@",
     "rates of stochastic depth: the first block is dropped too", "layers pieces model randomness"),
    ("m2", "keras_vit/model/layers/tokens.py", "self.attention(probe, x@@[:, self.prefix_tokens :]@@@@)",
     "attention pooling attends to the class token and the registers", "layers timm_variants model"),
    ("m3", "keras_vit/model/layers/resnet.py", "@@(ops.sqrt(variance)@@ops.sqrt(variance@@ + self.epsilon)",
     "a hybrid's epsilon is added to the variance, not to the deviation", "google_families layers"),
    ("m4", "keras_vit/model/layers/position_variants.py",
     "number * @@(rotary.trained_grid or side) / side@@side / (rotary.trained_grid or side)@@",
     "rotary positions at another size", "families position_variants timm_variants layers"),
    ("m5", "keras_vit/position.py", "kernel, widening=max(@@old / new@@new / old@@, 1.0)",
     "positions are enlarged blurred, and shrunk without antialias", "position"),
    ("m6", "keras_vit/position.py", '"@@ih,jw@@jh,iw@@,ijcd->hwcd"',
     "resized patches have rows and columns swapped", "position google_families"),
    ("m7", "keras_vit/model/preprocess.py", "corner += margins % 2@@ * (corner % 2)@@@@",
     "the centre crop is a pixel off", "preprocess samples"),
    ("m8", "keras_vit/model/images.py", "lambda: image[..., @@:3@@1:@@]",
     "of red, green, blue and alpha the last three are taken", "image_kinds preprocess"),
    ("m9", "keras_vit/model/layers/runtime.py", "@@-@@+@@ normalized * ops.matmul(d_gamma, to_mean)",
     "the compiled gradient of a LayerNorm", "pieces layers"),
    ("m10", "keras_vit/model/preprocess.py", 'if array.dtype.kind == "f" and 0 < high <= @@1@@0@@:',
     "float images of 0 to 1 are taken for nearly black ones", "preprocess"),
    ("t1", "keras_vit/train/optimizer.py", "recipe.layer_decay ** (num_layers @@+ 1 @@@@- _depth",
     "layer-wise decay: every rate is one layer off", "optimizers"),
    ("t2", "keras_vit/train/optimizer.py", "/ float(total_steps@@ - warmup@@@@)",
     "the schedule does not reach its end", "optimizers optimizers_optax recipes"),
    ("t3", "keras_vit/train/optimizer.py", "/ @@(root@@tf.sqrt(root * root@@ + self.recipe.epsilon)",
     "AdamW's epsilon is inside of the root", "optimizers"),
    ("t4", "keras_vit/train/optimizer.py", 'name.rpartition("/")[2] @@!= "kernel"@@== "gamma"@@',
     "weight decay also shrinks biases, tokens and positions", "optimizers"),
    ("t5", "keras_vit/train/step.py",
     '@@**{f"optimizer/{name}": slot for name, slot in self.optimizer.slots.items()},@@@@',
     "a resumed run has lost its momentum", "resume training_run"),
    ("t6", "keras_vit/train/step.py", "functools.partial(_move_average, @@1 - @@@@decay)",
     "moving averages follow the weights at once", "optimizers training_run"),
    ("t7", "keras_vit/train/loop.py", "start=@@first@@0@@,",
     "a resumed run sees its first images again", "resume training_run"),
    ("t8", "keras_vit/train/distill.py",
     "(@@np.array(students.mean) - teachers.mean@@teachers.mean - np.array(students.mean)@@)",
     "a teacher of another normalisation sees other images", "distill"),
    ("t9", "keras_vit/train/data/pipeline.py", '"label": augment.mixup(label, @@@@1 - @@weight)',
     "mixup: labels have the other image's share", "pipeline augment"),
    ("t10", "keras_vit/train/held_out.py", "math.isnan(loss) else @@-@@@@loss",
     "of equally accurate models the one of the highest loss is kept", "training_run map_training"),
    ("e1", "keras_vit/export/litert/images.py", "ops.constant(@@-@@@@255 * mean,",
     "sign of the mean in files that take pixels", "litert_images tflite"),
    ("e2", "keras_vit/model/resizing.py", "@@round(margin / 2) if is_even else @@@@margin // 2",
     "the file's centre crop is a pixel off", "litert_images preprocess"),
    ("e3", "keras_vit/export/litert/layers.py", "max(layer.epsilon * scale@@**2@@@@,",
     "epsilon of norms where channels are scaled", "outliers quantize litert"),
    ("e4", "keras_vit/export/litert/folding.py", "sines[..., @@: size // 2@@size // 2 :@@] *= -1",
     "rotary positions turn the other way in a file", "litert litert_fields family_abilities"),
    ("e5", "keras_vit/export/litert/folding.py",
     "return @@_deinterleave_heads(dense_weights(attention.key), attention)@@dense_weights(attention.key)@@",
     "the order of keys in a file with interleaved rotary positions", "litert litert_fields family_abilities"),
    ("e6", "keras_vit/export/quantize.py", "bias @@+@@-@@ error @ mean",
     "sign of the correction of the bias for rounded kernels", "quantize modes"),
    ("e7", "keras_vit/export/quantize.py",
     '= @@np.minimum(known["min"], least), np.maximum(known["max"], most)@@least, most@@',
     "fixed ranges are those of the last calibration images", "quantize modes"),
    ("e8", "keras_vit/export/verification.py", "not np.isfinite(values).@@all@@any@@()]",
     "a file that computes NaN for some images", "verification"),
    ("e9", "keras_vit/export/litert/head.py", "factor=@@0.5@@1.0@@).tensor",
     "the two heads of a distilled DeiT are added, not averaged", "litert family_abilities"),
    ("e10", "keras_vit/export/litert/head.py", "Affine(np.full(width, width**@@-@@@@0.5)",
     "length of normalised features in a file", "zero_shot litert text"),
)]
# fmt: on


class Tree:
    """A copy of a repository, in which one fault at a time is put into a file."""

    def __init__(self, root: Path, folder: str, seconds: float) -> None:
        self.root = Path(shutil.copytree(root, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(
            ".git", ".venv", ".*_cache", "__pycache__", "build", "dist", ".hypothesis"
        )))  # fmt: skip
        self.seconds = seconds

    def find_file(self, fault: Fault) -> Path | None:
        """Find the one file with the text: the fault's, or in another version of the package any other."""
        others = [path for folder in ("keras_vit", "converters") for path in (self.root / folder).rglob("*.[pt]*")]
        having = [path for path in [self.root / fault.path, *others] if path.is_file() and path.suffix != ".pyc"]
        counts = {path: path.read_text().count(fault.old) for path in having}
        found = [path for path in counts if counts[path]]
        own = self.root / fault.path
        return own if counts.get(own) == 1 else found[0] if len(found) == 1 and counts[found[0]] == 1 else None

    def run(self, *arguments: str) -> tuple[int | None, str]:
        """Run pytest; return its exit code (None: too slow) and the first test that failed."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-rfE"]
        environment = {**os.environ, "PYTHONPATH": str(self.root)}
        try:
            done = subprocess.run(
                [*command, *arguments], cwd=self.root, env=environment, timeout=self.seconds,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None, ""
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        if done.returncode not in (0, *FOUND, NONE_COLLECTED):
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        return done.returncode, failed[1] if failed else ""

    def stage(self, files: list[str], marker: str, path: Path, texts: tuple[str, str]) -> str:
        """Run a stage with the fault in a file: the test that finds it, "" or NOT_RUN."""
        good, bad = texts
        if not files:
            return ""
        try:
            _write(path, bad)
            code, test = self.run("-m", marker, *files)
        finally:
            _write(path, good)
        if code in FOUND and self.run(test)[0] != 0:
            raise RuntimeError(f"{test} fails without a fault too")
        return NOT_RUN if code is None else test if code in FOUND else ""


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def hunt(tree: Tree, fault: Fault, known: dict[str, str], *, rest: bool = False) -> dict[str, str]:
    """Run the stages that have no result yet until one finds the fault; stage -> test, "" or NOT_RUN."""
    path = tree.find_file(fault)
    if path is None:
        return {"": "not in this version"}
    good = path.read_text()
    texts = good, good.replace(fault.old, fault.new)
    files = {file.stem: str(file.relative_to(tree.root)) for file in sorted((tree.root / "tests").rglob("test_*.py"))}
    likeliest = [files[name] for test in fault.tests.split() if (name := f"test_{test}") in files]
    others = sorted(files.values())
    stages = {"quick": (likeliest, QUICK), "full": (likeliest, FULL)}
    if rest:
        stages["rest"] = [name for name in others if name not in likeliest], QUICK
    results = dict(known)
    for name, (chosen, marker) in stages.items():
        if any(test not in ("", NOT_RUN) for test in results.values()):
            break
        if results.get(name, NOT_RUN) == NOT_RUN:
            results[name] = tree.stage(chosen, marker, path, texts)
    return results


def main() -> None:
    """Hunt the faults and print a table."""
    parser = argparse.ArgumentParser(description="See which faults the tests find.")
    parser.add_argument("--only", nargs="+", default=[fault.id for fault in FAULTS], metavar="ID")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.json", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=400, help="of a stage")
    parser.add_argument("--rest", action="store_true", help="run the other quick tests too")
    arguments = parser.parse_args()
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(ROOT, folder, arguments.seconds)
        for fault in (fault for fault in FAULTS if fault.id in arguments.only):
            results[fault.id] = hunt(tree, fault, results.get(fault.id, {}), rest=arguments.rest)
            arguments.out.write_text(json.dumps(results, indent=1))
            print(f"{fault.id:4} {fault.breaks}: {results[fault.id]}", flush=True)


if __name__ == "__main__":
    main()
