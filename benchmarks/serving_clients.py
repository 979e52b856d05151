"""Send requests to a model server from many clients at once, some of them damaged files, and very large requests.

    python benchmarks/serving_clients.py > benchmarks/results/serving_clients.txt

The server is this script with --serve, in a process of its own, over gRPC: TensorFlow's session with TensorFlow
Serving's messages, without batching. It serves a SavedModel of ours, which takes image files, or Keras' export of the
same model. That one takes prepared images, so its clients decode and resize the files with Pillow. The contenders
alternate in short turns. Large requests go to a new server each; its peak of memory is read from /proc.
Needs tensorflow-serving-api and Pillow.
"""

import argparse
import contextlib
import io
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from serving import machine, threads

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "serving")]

import grpc  # noqa: E402
import grpc_client  # noqa: E402
import load  # noqa: E402
import tensorflow as tf  # noqa: E402
from PIL import Image  # noqa: E402
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc  # noqa: E402

OURS, OURS16, KERAS = "keras_vit: files", "keras_vit, dtype=bfloat16: files", "Keras' export: prepared by clients"
CORRUPT = 0.01  # share of the files
TURN = 10.0  # seconds of one contender before the next one's turn
LARGE_FILES = 256  # of one request
LARGE_BYTES = 20_000_000
HANDLERS = 16  # requests that the server answers at the same time


def write(folder: Path, name: str) -> dict[str, Path]:
    """Export a model with random weights in all ways; return the folders of versions."""
    import keras

    from keras_vit import VisionTransformer, ViTConfig, export

    keras.utils.set_random_seed(0)
    model = VisionTransformer(ViTConfig.from_name(name))
    folders = {OURS: folder / "ours", OURS16: folder / "ours16", KERAS: folder / "keras"}
    export.saved_model(model, folders[OURS] / "1")
    export.saved_model(model, folders[OURS16] / "1", dtype="bfloat16")
    model.export(str(folders[KERAS] / "1"), verbose=False)
    return folders


def photos() -> list[bytes]:
    """Return JPEG files of 640x480 with different contents."""
    rng, files = np.random.default_rng(1), []
    for _ in range(8):
        image = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((640, 480), Image.BICUBIC)
        files.append(_encoded(image, "JPEG", quality=90))
    return files


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def large_requests(file: bytes) -> dict[str, list[bytes]]:
    """Return requests by what they are: many files, a large file, a damaged large file, a small file of many pixels."""
    noise = Image.fromarray(np.random.default_rng(2).integers(0, 256, (2600, 2600, 3), dtype=np.uint8))
    large = _encoded(noise, "PNG", compress_level=0)
    blank = Image.new("L", (20_000, 20_000))
    return {
        f"{LARGE_FILES} files": [file] * LARGE_FILES,
        f"one PNG of {len(large) / 1e6:.0f} MB": [large],
        f"{LARGE_BYTES / 1e6:.0f} MB that are no image": [bytes(LARGE_BYTES)],
        "a PNG of 0.4 MB with 400 million pixels": [_encoded(blank, "PNG")],
    }


def serve(folder: Path) -> None:
    """Answer Predict requests with a SavedModel, and print the address."""
    session = tf.compat.v1.Session(graph=tf.Graph())
    with session.graph.as_default():
        signatures = tf.compat.v1.saved_model.load(session, ["serve"], str(folder)).signature_def

    class Prediction(prediction_service_pb2_grpc.PredictionServiceServicer):
        def Predict(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the name in the .proto
            signature = signatures[request.model_spec.signature_name or "serving_default"]
            fetches = {name: signature.outputs[name].name for name in request.output_filter or signature.outputs}
            feeds = {signature.inputs[name].name: tf.make_ndarray(value) for name, value in request.inputs.items()}
            try:
                found = session.run(fetches, feeds)
            except tf.errors.InvalidArgumentError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
            answer = predict_pb2.PredictResponse()
            for name, value in found.items():
                dtype = signature.outputs[name].dtype
                answer.outputs[name].CopyFrom(tf.make_tensor_proto(value, dtype=dtype, shape=value.shape))
            return answer

    unlimited = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
    running = grpc.server(ThreadPoolExecutor(HANDLERS), options=unlimited)
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Prediction(), running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    print(f"gRPC 127.0.0.1:{port}", flush=True)
    running.wait_for_termination()


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[str, int]]:
    """Start a server; yield its gRPC address, when it answers, and its process id."""
    command = [sys.executable, __file__, "--serve", str(folder / "1")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        [address] = re.findall(r"gRPC (\S+)", process.stdout.readline())
        yield address, process.pid
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def prepared(address: str) -> Iterator[load.Send]:
    """Decode and resize files, and send them as floats to Keras' export."""

    def send(files: list[bytes]) -> list[bool]:
        try:
            images = [Image.open(io.BytesIO(file)).convert("RGB").resize((224, 224), Image.BILINEAR) for file in files]
        except OSError as error:
            raise ValueError(str(error)) from error
        batch = np.stack([np.asarray(image, np.float32) / 127.5 - 1 for image in images])
        request = grpc_client.PredictRequest()
        request.model_spec.name = "vit"
        request.inputs["images"].CopyFrom(tf.make_tensor_proto(batch))
        stub.Predict(request, timeout=120)
        return [True] * len(files)

    with grpc.insecure_channel(address) as channel:
        stub = grpc_client.PredictionServiceStub(channel)
        yield send


def sender(contender: str, address: str) -> Any:
    """Return the context manager of one client's connection."""
    if contender == KERAS:
        return prepared(address)
    return load.over_grpc(address, model="vit", signature="serving_default")


def megabytes(pid: int, name: str) -> float:
    """Return a process' memory: VmRSS now, or VmHWM at most."""
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{name}:")[2].split()[0]) / 1000


def wait(contender: str, address: str, file: bytes) -> None:
    """Wait until a server has loaded its model."""
    for _ in range(600):
        with contextlib.suppress(grpc.RpcError), sender(contender, address) as send:
            send([file])
            return
        time.sleep(0.2)
    raise TimeoutError(f"{contender} does not answer")


def under_load(folders: dict[str, Path], files: list[bytes], clients: int, seconds: float) -> None:
    """Print each contender's counts, throughput and times, from turns that alternate."""
    totals = {name: load.Counts() for name in folders}
    taken, peaks = dict.fromkeys(folders, 0.0), {}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(server(folder)) for name, folder in folders.items()}
        for name, (address, _) in servers.items():
            wait(name, address, files[0])
        for turn in range(max(1, round(seconds / TURN))):
            for name, (address, pid) in servers.items():
                start = time.monotonic()
                end = start + min(TURN, seconds)
                part = load.run(
                    lambda name=name, address=address: sender(name, address),
                    files,
                    going=lambda end=end: time.monotonic() < end,
                    threads=clients,
                    corrupt=CORRUPT,
                    seed=turn,
                )
                taken[name] += time.monotonic() - start
                total = totals[name]
                total.images, total.corrupt = total.images + part.images, total.corrupt + part.corrupt
                total.refused += part.refused
                total.times += part.times
                total.failures += part.failures
                peaks[name] = megabytes(pid, "VmHWM")
    for name, total in totals.items():
        rate = len(total.times) / taken[name]
        print(f"{name}: {rate:.1f} requests/s, peak of the server's memory {peaks[name]:.0f} MB\n{total}\n")
    lost = sum(total.failures.total() for total in totals.values())
    print(f"requests with good files that were lost: {lost} (target: 0, {'met' if not lost else 'missed'})\n")


def large(folder: Path, files: list[bytes]) -> None:
    """Print what happens to large requests, and how much memory they take."""
    for name, request in large_requests(files[0]).items():
        with server(folder) as (address, pid):
            wait(OURS, address, files[0])
            before = megabytes(pid, "VmRSS")
            start = time.perf_counter()
            with sender(OURS, address) as send:
                try:
                    outcome = f"answered, {len(send(request))} rows"
                except ValueError as error:
                    outcome = f"refused: {str(error).splitlines()[0][:100]}"
            seconds, peak = time.perf_counter() - start, megabytes(pid, "VmHWM") - before
            wait(OURS, address, files[0])  # it still answers
        print(f"{name}: {outcome}\n  {seconds:.1f} s, {peak:.0f} MB of memory above that before it")


def main() -> None:
    """Export, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Ti/16")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60, help="of each contender, in turns of 10 seconds")
    parser.add_argument("--serve", type=Path, metavar="FOLDER", help="only serve this SavedModel, on a free port")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    threads()
    files = photos()
    with tempfile.TemporaryDirectory() as directory:
        folders = write(Path(directory), options.model)
        print(f"{options.model}, {options.clients} clients, {options.seconds:g} s for each contender, gRPC on loopback")
        print(f"from the same CPUs; JPEG files of 640x480, {CORRUPT:.0%} of them cut in half")
        print(f"{machine()}\n")
        under_load(folders, files, options.clients, options.seconds)
        print("One large request to serving_default, with the server otherwise idle:")
        large(folders[OURS], files)


if __name__ == "__main__":
    main()
