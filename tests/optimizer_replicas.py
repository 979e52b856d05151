"""Train `optimizer_cases` on two virtual CPUs, which must be created before TensorFlow starts: in a new process."""

import sys

import keras
import numpy as np
import tensorflow as tf

from keras_vit.train.optimizer import Optimizer, clip, update_variables
from optimizer_cases import CASES, CHOSEN, NAMES, NUM_LAYERS, STEPS, WARMUP, gradients, make_recipe, start


def run(strategy: tf.distribute.Strategy, case: str) -> dict[str, np.ndarray]:
    """Return every copy of every variable after all steps, by kind, number and replica."""
    given = [tf.constant(np.stack(each)) for each in zip(*gradients(), strict=True)]
    with strategy.scope():
        make = tf.Variable if "linear" in case else lambda value: keras.Variable(value).value
        variables = [make(value) for value in start()]
        averages = [tf.Variable(value) for value in start()]
        recipe = make_recipe(**CASES[case])
        optimizer = Optimizer(recipe, variables, NAMES, total_steps=STEPS, warmup=WARMUP, num_layers=NUM_LAYERS)

    def track(average: tf.Variable, weight: tf.Variable) -> None:
        average.assign(0.9 * average + 0.1 * weight)

    def replica(step: tf.Tensor) -> None:
        context = tf.distribute.get_replica_context()
        # The replicas have different gradients: a quarter and three quarters of the sum.
        share = 0.25 + 0.5 * tf.cast(context.replica_id_in_sync_group, tf.float32)
        clipped, _ = clip(context.all_reduce("SUM", [share * each[step] for each in given]), 5.0)
        optimizer.apply(clipped, step)
        update_variables([(a, track, (v,)) for a, v in zip(averages, variables, strict=True)])

    @tf.function
    def steps(first: tf.Tensor, last: tf.Tensor) -> None:
        for step in tf.range(first, last):
            strategy.run(replica, args=(step,))

    for first in range(0, STEPS, 20):
        steps(tf.constant(first, tf.int64), tf.constant(first + 20, tf.int64))
    kinds = {"variables": variables, "averages": averages, "slots": list(optimizer.slots.values())}
    return {
        f"{case}/{kind}/{number}/{copy}": tf.cast(value, tf.float32).numpy()
        for kind, those in kinds.items()
        for number, variable in enumerate(those)
        for copy, value in enumerate(strategy.experimental_local_results(variable))
    }


if __name__ == "__main__":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    np.savez(sys.argv[1], **{name: value for case in CHOSEN for name, value in run(mirrored, case).items()})
