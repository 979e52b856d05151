"""Download one file over HTTP, with retries, resumption, limits on slowness, and verification.

The package pooch verifies a hash that is known beforehand; it does not resume, limit stalls or read server checksums.
"""

import base64
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import requests
import urllib3

from keras_vit._util.download.integrity import CorruptFileError, Expected, verify
from keras_vit._util.progress import counter
from keras_vit.errors import DownloadError, FileUnavailableError

ATTEMPTS = 5
BACKOFF = 1.0  # seconds before the second attempt; doubled before each later one
STALL = 20.0  # seconds without a byte or a connection after which an attempt fails
HEADER_DEADLINE = 60.0  # seconds for all headers of an attempt, those of redirects included
SLOWEST = 1024  # bytes per second; an attempt fails if it receives less for SLOW_PERIOD
SLOW_PERIOD = 30.0  # seconds
MAX_REDIRECTS = 10
CHUNK = 1 << 18
UNAVAILABLE_STATUS = (401, 403, 404, 410)
TRANSIENT_STATUS = (408, 416, 425, 429, 500, 502, 503, 504)
UNREACHABLE = (urllib3.exceptions.ConnectTimeoutError, urllib3.exceptions.ProxyError)


class TransientError(Exception):
    """A failure after which another attempt may succeed."""


class UnreachableError(TransientError):
    """There is no connection to the host. Another attempt is made only if an earlier one reached it."""


def download(url: str, part: Path, expected: Expected) -> str:
    """Download a file to `part`, named X.part, verify it, flush it to disk, and return its SHA-256 (hexadecimal).

    A later process continues an incomplete `part`. `expected` is completed by the server's length and checksums; the
    suffix of X decides how the file is checked. The statuses 401, 403, 404 and 410 raise a FileUnavailableError at
    once; a host that cannot be reached, `ATTEMPTS` failures or wrong content twice a DownloadError; a full disk an
    OSError.
    """
    failures: list[Exception] = []
    while len(failures) < ATTEMPTS:
        if failures:
            time.sleep(BACKOFF * 2 ** (len(failures) - 1))
        try:
            return verify(part, _attempt(url, part, expected), Path(part.stem).suffix)
        except CorruptFileError as error:
            part.unlink(missing_ok=True)  # the resumption or the network may be the cause; if not, it happens again
            if any(isinstance(failure, CorruptFileError) for failure in failures):
                raise DownloadError(f"{url} was received twice with wrong content: {error}.") from error
            failures.append(error)
        except TransientError as error:
            if isinstance(error, UnreachableError) and not failures:
                raise DownloadError(str(error)) from error
            failures.append(error)
    raise DownloadError(
        f"{url} could not be downloaded in {ATTEMPTS} attempts. If it cannot be reached, set KERAS_VIT_MIRROR to "
        f"a folder that has the file. The last attempt: {failures[-1]}."
    ) from failures[-1]


def _attempt(url: str, part: Path, expected: Expected) -> Expected:
    """Request the missing bytes once, append them to `part`, and return `expected` completed by the server's facts."""
    suffix = Path(part.stem).suffix
    offset = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    with _get(url, headers) as response:
        if response.status_code == 416:
            part.unlink(missing_ok=True)
        _require_success(response)
        length = _total_length(response, offset)
        if length is not None and expected.size not in (None, length):
            raise CorruptFileError(f"the server states {length:,} bytes, expected {expected.size:,}")
        size = expected.size if length is None else length
        # Google's storage states `x-goog-hash: crc32c=<base64>,md5=<base64>`.
        pairs = re.findall(r"\b(md5|crc32c)=([A-Za-z0-9+/]+=*)", response.headers.get("x-goog-hash", ""))
        checksums = {algorithm: base64.b64decode(digest) for algorithm, digest in pairs}
        stated = replace(expected, size=size, checksums=checksums)
        if not stated.can_verify(suffix):
            raise DownloadError(
                f"{url}: the server states neither a length nor a checksum, so damage could not be detected."
                " Add the file's hash to the end of the URL: #sha256=<hex>."
            )
        # Without a check of every byte, parts of two versions of the file could be joined.
        can_resume = stated.checks_content(suffix)
        if response.status_code == 206 and not can_resume:
            raise CorruptFileError("the part that was received before cannot be checked")
        try:
            _receive(response, part, stated.size)
        except BaseException as error:
            if not can_resume or isinstance(error, OSError):  # of the disk: network errors are urllib3's
                part.unlink(missing_ok=True)
            raise
    return stated


def no_connection(host: str | None) -> str:
    """Return the message about a host that cannot be reached."""
    return (
        f"There is no connection to {host}. Without a network, use the model 'digits' or the path of a file; "
        "KERAS_VIT_OFFLINE=1 uses only files that were downloaded before."
    )


@contextmanager
def _get(url: str, headers: Mapping[str, str]) -> Iterator[requests.Response]:
    """Open a response; network failures while it is open become a `TransientError` or a DownloadError."""
    try:
        with requests.Session() as session:
            session.max_redirects = MAX_REDIRECTS
            # A redirect is closed before its body is read, which can have any length.
            session.hooks["response"].append(lambda response, **_: response.close() if response.is_redirect else None)
            if url.startswith("https:"):
                del session.adapters["http://"]  # others could read and change what a redirect to http returns
            with _before_deadline(session, url, headers) as response:
                yield response
    except requests.exceptions.InvalidSchema as error:
        raise DownloadError(f"{url} redirects from https to http, or to no web address: {error}.") from error
    except (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError) as error:
        if isinstance(getattr(error.args[0] if error.args else None, "reason", None), UNREACHABLE):
            raise UnreachableError(no_connection(urlsplit(url).hostname)) from error
        raise TransientError(f"{type(error).__name__}: {error}") from error
    except (requests.RequestException, ValueError) as error:  # ValueError: addresses and headers that cannot be parsed
        raise DownloadError(f"{url} cannot be requested: {str(error)[:300]}") from error


def _before_deadline(session: requests.Session, url: str, headers: Mapping[str, str]) -> requests.Response:
    """Request a URL in a thread, and wait until the deadline: the timeout of requests is for single reads."""
    answer: Future[requests.Response] = Future()

    def call() -> None:
        try:
            answer.set_result(session.get(url, headers=headers, stream=True, timeout=STALL))
        except Exception as error:  # raised in the calling thread
            answer.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    try:
        return answer.result(timeout=HEADER_DEADLINE)
    except TimeoutError:
        answer.add_done_callback(lambda late: None if late.exception() else late.result().close())
        raise TransientError(f"the server sent no complete headers in {HEADER_DEADLINE:g} seconds") from None


def _require_success(response: requests.Response) -> None:
    answer = f"{response.url} answered {response.status_code} {response.reason}"
    if response.status_code in UNAVAILABLE_STATUS:
        raise FileUnavailableError(f"{answer}: no such file there, or no access to it.")
    if response.status_code in TRANSIENT_STATUS:
        raise TransientError(answer)
    if response.status_code not in (200, 206):
        raise DownloadError(f"{answer} instead of a file.")


def _total_length(response: requests.Response, offset: int) -> int | None:
    """Return the length of the whole file that the response states, and check that a part begins at `offset`."""
    if response.status_code == 206:
        content_range = response.headers.get("Content-Range", "")
        match = re.fullmatch("bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})", content_range)
        if match is None or int(match[1]) != offset:
            raise CorruptFileError(f"the server did not send the requested range, from byte {offset}")
        return int(match[2])
    length = response.headers.get("Content-Length", "")
    return int(length) if re.fullmatch("[0-9]{1,18}", length) else None


def _receive(response: requests.Response, part: Path, size: int | None) -> None:
    """Write the body to `part`, or append it to the bytes before its range, with a progress bar."""
    mode = "ab" if response.status_code == 206 else "wb"
    with part.open(mode) as file, counter(part.stem, total=size, done=file.tell(), in_bytes=True) as advance:
        for chunk in _chunks(response):
            file.write(chunk)
            advance(len(chunk))
            if size is not None and file.tell() > size:
                raise CorruptFileError(f"the server sent more than {size:,} bytes")
        file.flush()
        os.fsync(file.fileno())
        if size is not None and file.tell() < size:
            raise TransientError(f"the transfer ended after {file.tell():,} of {size:,} bytes")


def _chunks(response: requests.Response) -> Iterator[bytes]:
    """Yield the body as it arrives; raise a `TransientError` if it is too slow."""
    start, received = time.monotonic(), 0
    while chunk := response.raw.read1(CHUNK, decode_content=False):
        yield chunk
        received += len(chunk)
        if (seconds := time.monotonic() - start) >= SLOW_PERIOD:
            if received < SLOWEST * seconds:
                raise TransientError(f"{received:,} bytes were received in {seconds:.0f} seconds")
            start, received = time.monotonic(), 0
