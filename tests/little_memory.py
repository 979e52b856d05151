"""Read files in a process that may allocate 64 MiB more than it has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

READ = """
import resource, sys
from pathlib import Path
from keras_vit.converters.containers import CheckpointError, open_container

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for path in sys.argv[1:]:
    try:
        with open_container(path) as container:
            for name in container.headers:
                container.read(name)
    except CheckpointError as error:
        assert not isinstance(error.__cause__, MemoryError), error
    else:
        raise AssertionError(path + " was read")
"""


def assert_all_refused(paths: Iterable[Path]) -> None:
    """Assert that every file is a CheckpointError, and none because memory ran out."""
    command = [sys.executable, "-c", READ, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
