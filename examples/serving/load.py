"""Send image files to a model server from several threads, some of them corrupt, and count the answers.

python load.py http://localhost:8501 cat.jpg dog.png --seconds 60 --corrupt 0.01
python load.py localhost:8500 cat.jpg dog.png --signature tolerant --batch 4

The first command uses REST. The second, with an address without http://, uses gRPC. These requests count as failed:
without an answer; with an answer for another number of images; with an error although all images are good; and with a
corrupt image that is not refused (with the signature "tolerant": not marked). The exit status is 1 if any failed.
"""

import argparse
import collections
import contextlib
import dataclasses
import http.client
import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

# Sends image files; returns for each whether it is valid. Raises ValueError if the server refuses them.
Send = Callable[[list[bytes]], list[bool]]


@dataclasses.dataclass
class Counts:
    """Counts and times of all requests, in seconds."""

    images: int = 0
    corrupt: int = 0
    refused: int = 0
    times: list[float] = dataclasses.field(default_factory=list)
    failures: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, good: list[bool], taken: float, *, refused: bool, failure: str) -> None:
        """Add one request."""
        self.images += len(good)
        self.corrupt += good.count(False)
        self.refused += refused
        self.times.append(taken)
        if failure:
            self.failures[failure[:300]] += 1

    def quantile(self, share: float) -> float:
        """Return the time within which this share of the requests was answered."""
        times = sorted(self.times)
        return times[min(len(times) - 1, int(share * len(times)))] if times else float("nan")

    def __str__(self) -> str:
        p50, p99, most = (f"{1000 * self.quantile(share):.1f}" for share in (0.5, 0.99, 1))
        lines = [
            f"{len(self.times)} requests, {self.images} images, {self.corrupt} of them corrupt",
            f"{self.failures.total()} failed, {self.refused} refused for a corrupt image",
            f"ms: p50 {p50}, p99 {p99}, max {most}",
        ]
        return "\n".join(lines + [f"{count} x {message}" for message, count in self.failures.most_common(5)])


def _misjudged(good: list[bool], answered: list[bool], tolerant: bool) -> str:
    """Return what is wrong with the answer to good or corrupt images; empty if nothing is."""
    right = answered == good and (tolerant or all(good))
    return "" if right else f"{good.count(False)} of {len(good)} corrupt, and the answer says: {answered}"


@contextlib.contextmanager
def over_rest(url: str, *, model: str, signature: str) -> Iterator[Send]:
    """Send requests over one connection that stays open."""
    import rest_client

    def send(files: list[bytes]) -> list[bool]:
        rows = rest_client.classify(connection, files, model=model, signature=signature)
        return [row.get("valid", True) for row in rows]

    with contextlib.closing(http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=60)) as connection:
        yield send


@contextlib.contextmanager
def over_grpc(address: str, *, model: str, signature: str) -> Iterator[Send]:
    """Send requests over one gRPC channel."""
    import grpc
    import grpc_client

    outputs = ("classes", "scores", *(["valid"] if signature == "tolerant" else []))

    def send(files: list[bytes]) -> list[bool]:
        try:
            found = grpc_client.classify(stub, files, model=model, signature=signature, outputs=outputs)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise ValueError(error.details()) from error
            raise
        return found.get("valid", [True] * len(found["classes"]))

    with grpc.insecure_channel(address) as channel:
        stub = grpc_client.PredictionServiceStub(channel)
        yield send


def run(
    make: Callable[[], contextlib.AbstractContextManager[Send]],
    images: list[bytes],
    *,
    going: Callable[[], bool],
    tolerant: bool = False,
    threads: int = 4,
    batch: int = 1,
    corrupt: float = 0.0,
    seed: int = 0,
) -> Counts:
    """Send requests from several threads, one after the other in each.

    Args:
        make: creates the `Send` of a thread.
        images: contents of good files.
        going: called before every request; False ends the thread.
        tolerant: whether corrupt images are marked instead of refused.
        threads: their number.
        batch: images per request.
        corrupt: share of the images that are truncated to half.
        seed: for the choice of images.

    Returns:
        The sum over all threads.
    """
    counts, lock = Counts(), threading.Lock()

    def work(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        with contextlib.ExitStack() as opened:
            send = opened.enter_context(make())
            while going():
                good = [chance.random() >= corrupt for _ in range(batch)]
                files = [chance.choice(images) for _ in good]
                files = [file if fine else file[: len(file) // 2] for file, fine in zip(files, good, strict=True)]
                start, refused, failure = time.perf_counter(), False, ""
                try:
                    failure = _misjudged(good, [bool(value) for value in send(files)], tolerant)
                except ValueError as error:
                    refused = not tolerant and not all(good)
                    failure = "" if refused else f"refused good images: {error}"
                except Exception as error:  # every kind of failure is counted
                    failure = f"{type(error).__name__}: {error}"
                    send = opened.enter_context(make())
                taken = time.perf_counter() - start
                with lock:
                    counts.add(good, taken, refused=refused, failure=failure)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return counts


def main() -> None:
    """Print the counts and times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="http://host:8501, or host:8500 for gRPC")
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--model", default="vit")
    parser.add_argument("--signature", default="serving_default")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1, help="images of a request")
    parser.add_argument("--corrupt", type=float, default=0.01, help="share of the images")
    asked = parser.parse_args()
    sender = over_rest if asked.server.startswith("http://") else over_grpc
    end = time.monotonic() + asked.seconds
    counts = run(
        lambda: sender(asked.server, model=asked.model, signature=asked.signature),
        [path.read_bytes() for path in asked.images],
        going=lambda: time.monotonic() < end,
        tolerant=asked.signature == "tolerant",
        threads=asked.threads,
        batch=asked.batch,
        corrupt=asked.corrupt,
    )
    print(counts)
    raise SystemExit(bool(counts.failures))


if __name__ == "__main__":
    main()
