"""Run a .tflite file with LiteRT, in this process or in one of its own.

LiteRT does not check all that a file states: a damaged file can end the process. This file is also the program that
runs one in another process. It imports nothing of the package, which would take seconds.
"""

import contextlib
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

TIMEOUT = 600.0  # seconds for opening a file, and for each call
MAX_REASON = 300  # characters of what LiteRT says about a file
# Memory that a file may take in a process of its own: this, and so many times its size and that of its images. With 3
# heads and 16,384 patches of 16 x 16 pixels, the scores of attention are 64 times the image.
SPARE_MEMORY = 1 << 30
PER_FILE_BYTE, PER_IMAGE_BYTE = 64, 256

Arrays = dict[str, np.ndarray]  # by name


class LiteRTFile:
    """A .tflite file in this process; raises a ValueError if it cannot be loaded.

    `limits_memory` says that this process has no other task: a damaged file can state tensors of any size.
    """

    def __init__(self, path: Path, threads: int, *, limits_memory: bool = False) -> None:
        from ai_edge_litert.interpreter import Interpreter

        self._path = path
        self._limits_memory = limits_memory
        try:
            interpreter = Interpreter(model_path=str(path), num_threads=threads)
        except ValueError as error:
            raise ValueError(f"{path} is not a LiteRT file that can be run: {str(error)[:MAX_REASON]}") from None
        with self._errors():
            self._limit_memory(sum(4 * math.prod(map(int, each["shape"])) for each in interpreter.get_input_details()))
            interpreter.allocate_tensors()
            signatures = list(interpreter.get_signature_list())
            if not signatures:
                raise ValueError(f"{path} has no signature, which names the inputs and outputs")
            self._run = interpreter.get_signature_runner(signatures[0])
            arguments, self._results = self._run.get_input_details(), self._run.get_output_details()
        if len(arguments) != 1:
            raise ValueError(f"{path} has inputs {list(arguments)!r:.200}; expected one, the image")
        [(self._name, self._image)] = arguments.items()
        batch, *shape = (int(side) if side > 0 else None for side in self._image["shape_signature"])
        self.batch: int | None = batch
        self.shape: tuple[int | None, ...] = tuple(shape)
        self.dtype: str = "float32" if self._image["quantization"][0] else np.dtype(self._image["dtype"]).name

    def call(self, images: np.ndarray) -> tuple[Arrays, float]:
        """Return the outputs for images (batch, height, width, channels), and the seconds of the call."""
        self._limit_memory(images.nbytes)
        start = time.perf_counter()
        with self._errors():
            outputs = self._run(**{self._name: _quantized(images, self._image)})
        outputs = {key: _dequantized(values, self._results[key]) for key, values in outputs.items()}
        return outputs, time.perf_counter() - start

    def _limit_memory(self, image_bytes: int) -> None:
        if self._limits_memory and sys.platform == "linux":
            most = SPARE_MEMORY + PER_FILE_BYTE * self._path.stat().st_size + PER_IMAGE_BYTE * image_bytes
            used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_DATA, (min(used + most, sys.maxsize), resource.RLIM_INFINITY))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Replace LiteRT's errors about a damaged file by a ValueError that names the file."""
        try:
            yield
        except RuntimeError as error:
            raise ValueError(f"{self._path} cannot be run: {str(error)[:MAX_REASON]}") from None


def _quantized(values: np.ndarray, tensor: Any) -> np.ndarray:
    """Return floats as the integers of a quantized tensor; unchanged for other tensors."""
    (scale, zero_point), dtype = tensor["quantization"], tensor["dtype"]
    if not scale:
        return values.astype(dtype, copy=False)
    limits = np.iinfo(dtype)
    return np.rint(values / scale + zero_point).clip(limits.min, limits.max).astype(dtype)


def _dequantized(values: np.ndarray, tensor: Any) -> np.ndarray:
    """Return the integers of a quantized tensor as floats; unchanged for other tensors."""
    scale, zero_point = tensor["quantization"]
    return ((values.astype(np.float32) - zero_point) * scale).astype(np.float32) if scale else values


class IsolatedFile:
    """A .tflite file in a process of its own, with the attributes, the method and the errors of a `LiteRTFile`.

    If LiteRT crashes, or takes more than `TIMEOUT` seconds, this is a ValueError too. The process ends with the object.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self._path = path
        self._lock = threading.Lock()  # threads may share the file
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end
        command = [sys.executable, "-P", __file__, str(path.absolute()), str(path), str(threads)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._messages)
        weakref.finalize(self, _end, self._process, self._messages)
        found, _ = self._answer()
        self.batch: int | None = found["batch"]
        self.shape: tuple[int | None, ...] = tuple(found["shape"])
        self.dtype: str = found["dtype"]

    def call(self, images: np.ndarray) -> tuple[Arrays, float]:
        """Return the outputs for images, and the seconds that the call took in the other process."""
        with self._lock:
            with contextlib.suppress(BrokenPipeError):  # it has ended, as its missing answer says
                _send(self._process.stdin, {"images": images})
            values, outputs = self._answer()
            return outputs, values["seconds"]

    def _answer(self) -> tuple[dict[str, Any], Arrays]:
        """Return the next answer, or raise the error that it is."""
        ready = select.poll()
        ready.register(cast(BinaryIO, self._process.stdout), select.POLLIN)
        if not ready.poll(1000 * TIMEOUT):
            self._process.kill()
            raise ValueError(f"{self._path} cannot be run: LiteRT did not answer in {TIMEOUT:g} seconds")
        try:
            values, arrays = _receive(self._process.stdout)
        except EOFError:
            raise ValueError(
                f"{self._path} cannot be run: LiteRT crashed ({self._last_words()}). The file is damaged, or needs too "
                "much memory"
            ) from None
        if "error" in values:
            raise ValueError(values["error"])
        return values, arrays

    def _last_words(self) -> str:
        """Return how the process ended, and the last line of its messages that is not only information."""
        self._process.wait()
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").strip().splitlines()
        said = [line[:MAX_REASON] for line in lines if not line.startswith(("INFO", "WARNING"))][-1:]
        code = self._process.returncode
        return "; ".join([signal.strsignal(-code) or str(code) if code < 0 else f"exit status {code}", *said])


def _end(process: subprocess.Popen[bytes], messages: BinaryIO) -> None:
    """Close the files of a process, at which it ends, unless it hangs."""
    for pipe in (process.stdin, process.stdout, messages):
        with contextlib.suppress(BrokenPipeError):
            cast(BinaryIO, pipe).close()
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _send(stream: Any, arrays: Arrays, **values: Any) -> None:
    """Write a line of JSON with values and the arrays' types and shapes, and then the numbers of the arrays."""
    if texts := [name for name, array in arrays.items() if array.dtype.kind not in "biuf"]:
        raise ValueError(f"the outputs {texts} are not numbers")
    about = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    stream.write(json.dumps({**values, "arrays": about}).encode() + b"\n")
    for array in arrays.values():
        stream.write(np.ascontiguousarray(array).data)
    stream.flush()


def _receive(stream: Any) -> tuple[dict[str, Any], Arrays]:
    """Read what `_send` wrote: values and arrays; raise an EOFError if the stream ends before."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    values = json.loads(line)
    arrays = {}
    for name, (dtype, shape) in values.pop("arrays").items():
        data = stream.read(np.dtype(dtype).itemsize * math.prod(shape))
        if len(data) < np.dtype(dtype).itemsize * math.prod(shape):
            raise EOFError
        arrays[name] = np.frombuffer(data, dtype).reshape(shape)
    return values, arrays


def _serve(place: str, name: str, threads: int) -> None:
    """Open a file, and answer images on standard input with outputs on standard output, until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # LiteRT may print to standard output

    def send_error(error: Exception) -> None:
        told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        told = told.replace(place, name)
        _send(answers, {}, error=told if told.startswith(name) else f"{name} cannot be run: {told[:MAX_REASON]}")

    try:
        file = LiteRTFile(Path(place), threads, limits_memory=True)
    except Exception as error:  # LiteRT's wrapper raises errors of many types for damaged files
        send_error(error)
        return
    _send(answers, {}, batch=file.batch, shape=file.shape, dtype=file.dtype)
    with contextlib.suppress(EOFError):
        while True:
            _, given = _receive(sys.stdin.buffer)
            try:
                outputs, seconds = file.call(given["images"])
                _send(answers, outputs, seconds=seconds)
            except Exception as error:
                send_error(error)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
