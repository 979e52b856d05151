"""Lower a whole training step to the program for a TPU's compiler, on a machine without a TPU.

    python examples/tpu/lower_step.py --model ViT-B/16 --batch 64

README.md in this folder describes the environment. The step is the one of `keras_vit.train.run` on one replica
(forward, backward, micro-batches, clip by the global norm, AdamW) with the package's objective and optimizer. Their
variables are inputs and outputs here, because a program with variables can only be lowered on the device that has them.
The script shows that every operation of the step has a TPU kernel. It does not compile for a TPU, does not check a
TPU's memory, and runs nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # libtpu must not ask the cloud for this machine's TPU

import keras
import tensorflow as tf

from keras_vit import train, zoo
from keras_vit.train import optimizer as update_rules
from keras_vit.train import prepare, step
from keras_vit.train.objective import supervised

CLASSES = 1000
# An operation's name is between its type and its arguments: %x = bf16[64,768]{1,0} add(...)
OPERATION = re.compile(r"^ *(?:ROOT )?%?[\w.-]+ = \(?(\w+)\[.*? ([a-z][a-z0-9-]*)\(", re.MULTILINE)


class Held:
    """A tensor with the assignments that `Optimizer` uses: a variable inside one function."""

    def __init__(self, tensor: tf.Tensor) -> None:
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, tensor.shape

    def assign(self, value: tf.Tensor) -> None:
        """Set another value."""
        self.tensor = value

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtract a value."""
        self.tensor -= value

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        del dtype, name
        return self.tensor


tf.register_tensor_conversion_function(Held, lambda held, *_, **__: held.tensor)


def lowered(function: Callable[..., Any], *specs: Any) -> str:
    """Return the function as the HLO text that TensorFlow would pass to a TPU's compiler.

    Args:
        function: takes tensors and has no variables.
        specs: tf.TensorSpec of its arguments.

    Raises:
        ValueError: an operation has no TPU kernel; the message names it.
    """
    compiled = tf.function(function, jit_compile=True, autograph=False)
    return compiled.experimental_get_compiler_ir(*specs)(stage="hlo", platform_name="TPU")


def training_step(recipe: train.Recipe, model: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Return the step and the specs of its arguments: step number, images, labels, weights, optimizer state.

    The step returns the new weights and state, the loss and the gradient's norm.
    """
    weights = model.trainable_variables
    names = [v.path for v in weights]
    rule = update_rules.Optimizer(
        recipe,
        [v.value for v in weights],
        names,
        total_steps=10_000,
        warmup=500,
        num_layers=model.config.num_layers,
    )
    slots = list(rule.slots)
    objective = supervised(recipe, model)

    def new_state(now: tf.Tensor, images: tf.Tensor, labels: tf.Tensor, *state: tf.Tensor) -> Any:
        values, kept = state[: len(weights)], state[len(weights) :]

        def gradients(batch: dict[str, Any], seed: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
            with tf.GradientTape() as tape, keras.StatelessScope(list(zip(weights, values, strict=True))):
                tape.watch(values)
                losses, _ = objective.losses(model, batch, seed)
                loss = tf.reduce_sum(losses) / recipe.batch_size
            return list(tape.gradient(loss, values)), loss

        seed = step.replica_seed(recipe, now, tf.distribute.get_replica_context().replica_id_in_sync_group)
        batch = {"image": images, "label": labels}
        zeros = [tf.zeros_like(value) for value in values], tf.zeros(())
        sums, loss = step.accumulate(gradients, batch, seed, count=recipe.accumulation, zeros=zeros)
        clipped, norm = update_rules.clip(sums, recipe.clip_norm)
        rule.variables = [Held(value) for value in values]
        rule.slots = dict(zip(slots, map(Held, kept), strict=True))
        rule.apply(clipped, now)
        return [held.tensor for held in (*rule.variables, *rule.slots.values())], loss, norm

    size = (recipe.batch_size, *model.input_shape[1:])
    inputs = [tf.TensorSpec(size, tf.float32), tf.TensorSpec((recipe.batch_size, CLASSES), tf.float32)]
    state = [tf.TensorSpec(v.shape, v.dtype) for v in (*rule.variables, *rule.slots.values())]
    return new_state, [tf.TensorSpec((), tf.int64), *inputs, *state]


def statistics(text: str) -> str:
    """Count a program's operations, the most frequent first, and the dtypes of its matrix products."""
    found = OPERATION.findall(text)
    operations = Counter(name for _, name in found)
    products = Counter(dtype for dtype, name in found if name in ("dot", "convolution"))
    return (
        f"operations: {', '.join(f'{name} {count:,}' for name, count in operations.most_common())}\n"
        f"matrix products and convolutions: {', '.join(f'{count:,} {name}' for name, count in products.items())}"
    )


def told_of_unsupported() -> str:
    """Return the error for an operation without a TPU kernel, which shows that this check can fail."""

    def turned(images: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.ImageProjectiveTransformV3(
            images=images,
            transforms=[[0.9, 0.1, 0.0, -0.1, 0.9, 0.0, 0.0, 0.0]],
            output_shape=images.shape[1:3],
            fill_value=0.0,
            interpolation="BILINEAR",
            fill_mode="CONSTANT",
        )

    try:
        lowered(turned, tf.TensorSpec((8, 32, 32, 3), tf.float32))
    except ValueError as error:
        return str(error).partition("[] ")[2].partition(" compatible")[0] + ")"
    raise SystemExit("An operation that TPUs do not have was lowered: this TensorFlow checks nothing.")


def main() -> None:
    """Read the command line, lower the step, and print its operations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B/16", help="an architecture (ViT-B/16)")
    parser.add_argument("--recipe", default="pretrain-i1k", help="a recipe (pretrain-i1k: AdamW, clip 1, dropout 0.1)")
    parser.add_argument("--batch", type=int, default=64, help="images on one core (64)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step (1)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels (224)")
    parser.add_argument("--hlo", type=Path, help="write the program to this file")
    arguments = parser.parse_args()

    recipe = train.recipe(
        arguments.recipe,
        batch_size=arguments.batch,
        accumulation=arguments.accumulation,
        image_size=arguments.image_size,
        precision="mixed_bfloat16",
    )
    model = prepare.adapt_model(recipe, zoo.load(arguments.model, weights=None), num_classes=CLASSES)
    start = time.perf_counter()
    function, specs = training_step(recipe, model)
    text = lowered(function, *specs)
    seconds = time.perf_counter() - start
    if arguments.hlo:
        arguments.hlo.write_text(text, encoding="utf-8")
    print(f"{arguments.model}, {recipe.name}: lowered for TPU in {seconds:.0f} s, {len(text) / 1e6:.1f} MB of HLO")
    print(statistics(text))
    print("refused, as it should be:", told_of_unsupported())


if __name__ == "__main__":
    main()
