"""Choose the devices that train: one, all of this machine, several machines, or a TPU."""

import json
import os
import re
from typing import Any

import keras
import tensorflow as tf

from keras_vit._util.checks import check_texts
from keras_vit._util.text import warn

STRATEGIES = ("auto", "one", "mirrored", "workers", "tpu")
_ROLES = ("chief", "worker")
_EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
_CONNECTED: dict[str, tf.distribute.Strategy] = {}  # by this machine's address: a process can connect only once


def strategy(name: str = "auto") -> tf.distribute.Strategy:
    """Choose the strategy of tf.distribute by name. Call it before TensorFlow runs anything else.

    Args:
        name: "one": the default device. "mirrored": every GPU of this machine (without any, every logical CPU).
            "workers": the machines in the environment variable TF_CONFIG, each with all of its GPUs. "tpu": the TPU of
            this machine; "tpu:NAME": the one of that name or address. "auto": "workers" if TF_CONFIG names several
            machines, "tpu" if TPU_NAME is set, "mirrored" if there are several GPUs, else "one". With "workers" this
            waits until all machines have started.

    Raises:
        ValueError: The name is unknown, TF_CONFIG is missing or not valid, there is no TPU, or TensorFlow has already
            run something and cannot connect machines any more.

    Example:
        >>> keras_vit.train.strategy("one").num_replicas_in_sync
        1
    """
    check_texts(strategy=name)
    kind, _, address = name.partition(":")
    if kind not in STRATEGIES or (address and kind != "tpu"):
        raise ValueError(f"strategy must be one of {list(STRATEGIES)} or 'tpu:NAME'. Received: {name!r:.200}")
    if kind == "auto":
        kind = _detect()
    if kind == "workers":
        own = _check_workers()
        if own not in _CONNECTED:
            try:
                _CONNECTED[own] = tf.distribute.MultiWorkerMirroredStrategy()
            except RuntimeError as error:
                raise ValueError(
                    "TensorFlow must connect the machines before it runs anything else: call train.strategy('workers') "
                    f"first, and pass its result as strategy. Received: {error}"
                ) from error
        return _CONNECTED[own]
    if kind == "tpu":
        return _connect_tpu(address or os.environ.get("TPU_NAME") or "local")
    if kind == "mirrored":
        devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        return tf.distribute.MirroredStrategy([device.name for device in devices])
    return tf.distribute.get_strategy()


def check_backend() -> None:
    """Raise a ValueError under another back end of Keras than TensorFlow."""
    if keras.config.backend() != "tensorflow":
        raise ValueError(
            "train.run, evaluate, examine and few_shot need KERAS_BACKEND=tensorflow. Start a new process with it, or "
            "train and evaluate with Keras' own compile, fit and evaluate. "
            f"Received: KERAS_BACKEND={keras.config.backend()}"
        )


def is_cpu() -> bool:
    """Whether this machine has neither a GPU nor a TPU."""
    return not any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))


def has_workers(strategy: tf.distribute.Strategy) -> bool:
    """Whether several processes train together."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the one that writes files."""
    resolver = strategy.cluster_resolver
    if not has_workers(strategy) or resolver is None:
        return True
    first = "chief" if "chief" in resolver.cluster_spec().as_dict() else "worker"
    return (resolver.task_type, resolver.task_id) == (first, 0)


def local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Number of replicas of this process."""
    resolver = strategy.cluster_resolver
    if not has_workers(strategy) or resolver is None:
        return int(strategy.num_replicas_in_sync)
    workers = sum(len(tasks) for role, tasks in resolver.cluster_spec().as_dict().items() if role in _ROLES)
    return int(strategy.num_replicas_in_sync) // max(1, workers)


def largest(number: int, strategy: tf.distribute.Strategy) -> int:
    """Largest of the workers' numbers; all of them call this."""
    if not has_workers(strategy):
        return number

    def gather() -> Any:
        return tf.distribute.get_replica_context().all_gather(tf.constant([number]), axis=0)

    numbers = tf.function(lambda: strategy.run(gather))()  # outside of a tf.function TensorFlow warns that this is slow
    return int(max(strategy.experimental_local_results(numbers)[0]))


def _detect() -> str:
    if len(_addresses(os.environ.get("TF_CONFIG", "{}"))) > 1:
        return "workers"
    if os.environ.get("TPU_NAME"):
        return "tpu"
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdecimal() and int(tasks) > 1 and "TF_CONFIG" not in os.environ:
        warn(
            f"keras_vit: Slurm started {tasks} tasks, and each trains alone: TF_CONFIG is not set. "
            "docs/many-gpus-and-tpu-pods.md makes it of Slurm's variables. For separate runs pass strategy='one'"
        )
    return "mirrored" if len(tf.config.list_physical_devices("GPU")) > 1 else "one"


def _addresses(text: str) -> list[Any]:
    """Read the addresses of all machines from the JSON of TF_CONFIG."""
    try:
        cluster = json.loads(text).get("cluster", {})
        return [*cluster.get("chief", []), *cluster.get("worker", [])]
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"TF_CONFIG must be JSON such as {_EXAMPLE}. Received: {text!r:.200}") from error


def _check_workers() -> str:
    """Find this machine's address in TF_CONFIG; raise a ValueError if that is not complete."""
    text = os.environ.get("TF_CONFIG")
    if text is None:
        raise ValueError(
            "strategy='workers' needs the environment variable TF_CONFIG on every machine, with its own index. "
            f"It is not set. Example: TF_CONFIG='{_EXAMPLE}'"
        )
    task = json.loads(text).get("task") if _addresses(text) else None
    if not isinstance(task, dict) or not isinstance(task.get("index"), int) or task.get("type") not in _ROLES:
        raise ValueError(f"TF_CONFIG must name a cluster and this machine's task: {_EXAMPLE}. Received: {text!r:.200}")
    workers = json.loads(text)["cluster"].get(task["type"], [])
    if not 0 <= task["index"] < len(workers):
        raise ValueError(
            f"TF_CONFIG: the task index must be below {len(workers)}, the number of machines of type {task['type']!r}. "
            f"Received: {task['index']}"
        )
    if wrong := [address for address in _addresses(text) if not re.fullmatch(r".+:\d+", str(address))]:
        raise ValueError(f"TF_CONFIG: an address is host:port, such as host0:2222. Received: {wrong}")
    return str(workers[task["index"]])


def _connect_tpu(address: str) -> tf.distribute.Strategy:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(address)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"There is no TPU at {address!r:.200} ({type(error).__name__}). On a TPU machine install tensorflow-tpu in "
            "place of tensorflow (docs/many-gpus-and-tpu-pods.md has the commands), or name another strategy: 'one', "
            "'mirrored' or 'workers'."
        ) from error
    return tf.distribute.TPUStrategy(resolver)
