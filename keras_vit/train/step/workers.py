"""Start several machines together, and name the one that is missing or was lost."""

import contextlib
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tensorflow as tf

from keras_vit._util.progress import print_line
from keras_vit._util.text import error_reason
from keras_vit.errors import WorkerLostError

TIMEOUT = 1800.0  # seconds to wait for the other machines
FIRST_REPORT = 30.0  # seconds until the missing ones are named; after each report twice as many until the next
CONNECT_SECONDS = 3.0  # to reach one address
# Matches TensorFlow's errors after another process died or stopped, but not those of an unreachable bucket.
_OF_WORKERS = re.compile(r"Collective|CoordinationService|/job:(?:chief|worker)/")


def wait_for_workers(
    addresses: Sequence[str], own: str, *, timeout: float, say: Callable[[str], None] = print_line
) -> None:
    """Wait until all machines listen at their addresses, "host:port"; this one listens at `own` meanwhile.

    TensorFlow waits too, but silently and forever. This raises a WorkerLostError after `timeout` seconds.
    """
    start, report_at, pause = time.monotonic(), FIRST_REPORT, 0.1
    missing = {address: "" for address in addresses if address != own}
    with _listening(own):
        while missing := {address: reason for address in missing if (reason := _unreachable(address))}:
            waited = time.monotonic() - start
            named = ", ".join(f"{address} ({reason})" for address, reason in missing.items())
            if waited >= timeout:
                raise WorkerLostError(
                    f"Not all {len(addresses)} workers have started after {waited:.0f} s. Missing: {named}. Start the "
                    f"same command on every machine, or state more seconds with worker_timeout={timeout:.0f}"
                )
            if waited >= report_at:
                say(f"{own} has waited {waited:.0f} s for {len(missing)} of {len(addresses)} workers: {named}")
                report_at = 2 * waited
            time.sleep(max(0.0, min(pause, timeout - waited)))
            pause = min(2 * pause, 2.0)


@contextlib.contextmanager
def name_lost_worker(strategy: tf.distribute.Strategy, done: Callable[[], str]) -> Iterator[None]:
    """Raise a WorkerLostError instead of TensorFlow's error if another process ended; `done` says what is saved.

    TensorFlow notices a process that ended after some seconds, and a stopped one after ten.
    """
    try:
        yield
    except tf.errors.OpError as error:
        resolver = strategy.cluster_resolver
        if resolver is None or not _OF_WORKERS.search(error.message):
            raise
        own = resolver.cluster_spec().task_address(resolver.task_type, resolver.task_id)
        others = [each for tasks in resolver.cluster_spec().as_dict().values() for each in tasks if each != own]
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        lost = list(filter(_unreachable, others)) or others  # a stopped process still accepts connections
        raise WorkerLostError(
            f"Lost a worker: {' or '.join(lost)} was killed or stopped, or cannot be reached ({type(error).__name__}). "
            f"{done()} To go on, start the same command on every machine, or on fewer with a new TF_CONFIG. "
            f"Here:\nTF_CONFIG={shlex.quote(os.environ.get('TF_CONFIG', ''))} {command}"
        ) from error


@contextlib.contextmanager
def _listening(address: str) -> Iterator[None]:
    """Accept connections at the port of an address, so that the other machines see this one."""
    port, dual = int(address.rpartition(":")[2]), socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)
    except OSError as error:
        raise OSError(
            f"This machine is {address} in TF_CONFIG, and its port {port} cannot be used ({error_reason(str(error))}): "
            "end the program that uses it, or change the port in every TF_CONFIG"
        ) from error
    with server:
        yield


def _unreachable(address: str) -> str:
    """Return why no connection to "host:port" is possible, or ""."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS):
            return ""
    except OSError as error:
        return error.strerror or str(error)
