"""Write and read what a linear probe was solved from: a file in its run folder, from which it is solved again."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit.errors import CheckpointError
from keras_vit.model.vision_transformer import hash_weights
from keras_vit.train.checkpoints import SOLVED_PROBE, as_os_error, read_file, replace_file
from keras_vit.train.least_squares import Fold, Head, add_images

EQUATIONS = (("features", "labels"), ("products", "sums"))  # arrays of `Kept` and of `Summed`
DAMAGES = (tf.errors.OpError, OSError, ValueError, LookupError, TypeError, EOFError, StopIteration, zipfile.BadZipFile)


@dataclass(frozen=True)
class SolvedProbe:
    """Equations and held-out features of a solved linear probe, without images; features are the head's input."""

    equations: Mapping[str, np.ndarray]  # of all training images
    held_out: Fold
    class_names: tuple[str, ...]
    strength: float  # of the regularisation, for each image
    scale: float  # of the scores: 1 / temperature
    facts: Mapping[str, Any]  # of `describe`

    def write(self, folder: str) -> None:
        """Write the file, complete or not at all."""
        about = {name: getattr(self, name) for name in ("class_names", "strength", "scale", "facts")}
        arrays: dict[str, Any] = {**self.equations, "about": np.array(json.dumps(about))}
        arrays["held_out"], arrays["held_out_labels"] = self.held_out
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        with as_os_error(f"{folder}/{SOLVED_PROBE} cannot be written"):
            replace_file(f"{folder}/{SOLVED_PROBE}", buffer.getvalue())

    @classmethod
    def read(cls, folder: str) -> SolvedProbe:
        """Read the file of a run folder."""
        path = f"{folder}/{SOLVED_PROBE}"
        if not tf.io.gfile.exists(path):
            raise FileNotFoundError(
                f"There is no {path}, from which classes are added. A linear probe without class_weights writes it: "
                "start the command of the run again with the same --out, which computes no feature again, or train "
                "one: keras-vit train linear-probe --model NAME --data FOLDER --out FOLDER"
            )
        try:
            with np.load(io.BytesIO(read_file(path)), allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                names = next(names for names in EQUATIONS if set(names) <= set(file))
                equations, held_out = {name: file[name] for name in names}, (file["held_out"], file["held_out_labels"])
            return cls(equations, held_out, **about | {"class_names": tuple(about["class_names"])})
        except DAMAGES as error:
            raise CheckpointError(f"{path} is damaged: {error!s:.200}. Start the command of its run again") from error

    def check(self, model: Any, folder: str) -> None:
        """Raise a CheckpointError that names what differs between the model of the folder and that of this probe."""
        then, now = self.facts, describe(model, self.facts["recipe"])
        fields = [name for name, value in now["model"].items() if value != then["model"].get(name)]
        differing = [f"{name}: {then['model'].get(name)!r:.80} then, {now['model'][name]!r:.80} now" for name in fields]
        if not differing and then["weights"] != now["weights"]:
            differing = ["weights"]
        if differing:
            raise CheckpointError(
                f"{folder}/{SOLVED_PROBE} is not of the model beside it: {'; '.join(differing)}. Put that model back, "
                "or start the command of the run again"
            )

    def extended(self, new: Fold, held_out: Fold, names: Sequence[str], kept: np.ndarray) -> tuple[SolvedProbe, Head]:
        """Solve with more images for the classes numbered `kept` of `names`, which begin with the own ones."""

        def select(own: Fold, more: Fold) -> Fold:
            features, labels = (np.concatenate(pair) for pair in zip(own, more, strict=True))
            rows = np.isin(labels, kept)
            return features[rows], np.searchsorted(kept, labels[rows])

        is_summed, known = "sums" in self.equations, self.equations
        features, labels = new if is_summed else select((known["features"], known["labels"]), new)
        sums = (known["products"], known["sums"]) if is_summed else None
        head, equations = add_images(sums, features, labels, num_classes=len(kept), strength=self.strength)
        class_names, held_out = tuple(names[number] for number in kept), select(self.held_out, held_out)
        probe = dataclasses.replace(self, equations=equations, held_out=held_out, class_names=class_names)
        return probe, (self.scale * head[0], self.scale * head[1])


def describe(model: Any, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the model that a solved probe belongs to, as JSON has it, with the recipe of its run."""
    facts = {"model": model.config.to_dict(), "recipe": recipe, "weights": hash_weights(model.weights)}
    return dict(json.loads(json.dumps(facts)))
