"""Which devices train: one, all of this machine, several machines, or a TPU."""

from __future__ import annotations

import json
import os
from typing import Any

import tensorflow as tf

STRATEGIES = ("auto", "one", "mirrored", "workers", "tpu")
_EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


def strategy(name: str = "auto") -> tf.distribute.Strategy:
    """The strategy of tf.distribute that a name stands for; make it before anything else of TensorFlow runs.

    Args:
        name: "one": the default device. "mirrored": every GPU of this machine (without any, every logical CPU).
            "workers": the machines in the environment variable TF_CONFIG, this one being its task; each worker
            uses all of its GPUs. "tpu": the TPU of this machine; "tpu:NAME": the one of that name or address.
            "auto": "workers" where TF_CONFIG names several, "tpu" where TPU_NAME is set, "mirrored" where there are
            several GPUs, else "one".

    Raises:
        ValueError: for another name, without TF_CONFIG or with one that cannot be read, or without a TPU.
    """
    kind, _, address = name.partition(":")
    if kind not in STRATEGIES or (address and kind != "tpu"):
        raise ValueError(f"strategy is one of {list(STRATEGIES)} or 'tpu:NAME'. Received: {name!r}")
    if kind == "auto":
        kind = _found()
    if kind == "workers":
        _check_workers()
        return tf.distribute.MultiWorkerMirroredStrategy()
    if kind == "tpu":
        return _tpu(address or os.environ.get("TPU_NAME") or "local")
    if kind == "mirrored":
        devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        return tf.distribute.MirroredStrategy([device.name for device in devices])
    return tf.distribute.get_strategy()


def is_chief(chosen: tf.distribute.Strategy) -> bool:
    """Whether this process is the one that writes files."""
    resolver = chosen.cluster_resolver
    if not isinstance(chosen, tf.distribute.MultiWorkerMirroredStrategy) or resolver is None:
        return True
    first = "chief" if "chief" in resolver.cluster_spec().as_dict() else "worker"
    return (resolver.task_type, resolver.task_id) == (first, 0)


def _found() -> str:
    if len(_addresses(os.environ.get("TF_CONFIG", "{}"))) > 1:
        return "workers"
    if os.environ.get("TPU_NAME"):
        return "tpu"
    return "mirrored" if len(tf.config.list_physical_devices("GPU")) > 1 else "one"


def _addresses(text: str) -> list[Any]:
    try:
        cluster = json.loads(text).get("cluster", {})
        return [*cluster.get("chief", []), *cluster.get("worker", [])]
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"TF_CONFIG is JSON such as {_EXAMPLE}. Received: {text!r}") from error


def _check_workers() -> None:
    text = os.environ.get("TF_CONFIG")
    if text is None:
        raise ValueError(
            "strategy='workers' needs the environment variable TF_CONFIG on every machine, with its own index. "
            f"It is not set; an example: TF_CONFIG='{_EXAMPLE}'"
        )
    task = json.loads(text).get("task") if _addresses(text) else None
    if not isinstance(task, dict) or not isinstance(task.get("index"), int) or task.get("type") not in _ROLES:
        raise ValueError(f"TF_CONFIG names a cluster and this machine's task, such as {_EXAMPLE}. Received: {text!r}")
    workers = json.loads(text)["cluster"].get(task["type"], [])
    if not 0 <= task["index"] < len(workers):
        raise ValueError(f"TF_CONFIG: task index {task['index']} is none of the {len(workers)} of {task['type']!r}")


_ROLES = ("chief", "worker")


def _tpu(address: str) -> tf.distribute.Strategy:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(address)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"There is no TPU at {address!r} ({type(error).__name__}). On a TPU machine install tensorflow-tpu in "
            "place of tensorflow (docs/many-gpus-and-tpu-pods.md has the commands), or name another strategy: 'one', "
            "'mirrored' or 'workers'."
        ) from error
    return tf.distribute.TPUStrategy(resolver)
