"""Download one file over HTTP, with retries, resumption, limits on slowness, and verification.

The package pooch verifies a hash that is known beforehand; it does not resume, limit stalls or read server checksums.
"""

import base64
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from keras_vit._util.integrity import CorruptFileError, Expected, verify
from keras_vit._util.progress import counter
from keras_vit.errors import DownloadError, FileUnavailableError

if TYPE_CHECKING:
    import requests

ATTEMPTS = 5
BACKOFF = 1.0  # seconds before the second attempt; doubled before each later one
STALL = 20.0  # seconds without a byte or a connection after which an attempt fails
HEADER_DEADLINE = 60.0  # seconds for all headers of an attempt, those of redirects included
SLOWEST = 1024  # bytes per second; an attempt fails if it receives less for SLOW_PERIOD
SLOW_PERIOD = 30.0  # seconds
MAX_REDIRECTS = 10
CHUNK = 1 << 18
# Only an ETag that can be sent back unchanged, and is not weak, identifies a version of a file.
STRONG_ETAG = re.compile(r'"[!#-~]{1,200}"')
UNAVAILABLE_STATUS = (401, 403, 404, 410)
TRANSIENT_STATUS = (408, 416, 425, 429, 500, 502, 503, 504)


class TransientError(Exception):
    """A failure after which another attempt may succeed."""


class UnreachableError(TransientError):
    """There is no connection to the host. Another attempt is made only if an earlier one reached it."""


def download(url: str, part: Path, expected: Expected, name: str) -> str:
    """Download a file to `part`, verify it, flush it to disk, and return its SHA-256 (hexadecimal).

    An incomplete `part` is resumed, also by a later process, if all of its content can be checked. `expected` is
    completed by the server's length and checksums. The suffix of `name` decides how the file is checked. The
    statuses 401, 403, 404 and 410 raise a FileUnavailableError at once; a host that cannot be reached, `ATTEMPTS`
    failures or wrong content twice a DownloadError; a full disk an OSError.
    """
    suffix = Path(name).suffix
    wrong_before = False
    failure: Exception
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(BACKOFF * 2 ** (attempt - 1))
        try:
            sha256 = verify(part, _attempt(url, part, expected, name), suffix)
            _etag_file(part).unlink(missing_ok=True)
            return sha256
        except CorruptFileError as error:
            _discard(part)  # the resumption or the network may be the cause; if not, the second attempt fails too
            if wrong_before:
                raise DownloadError(f"{url} was received twice with wrong content: {error}.") from error
            wrong_before, failure = True, error
        except TransientError as error:
            if not attempt and isinstance(error, UnreachableError):
                raise DownloadError(str(error)) from error
            failure = error
    raise DownloadError(
        f"{url} could not be downloaded in {ATTEMPTS} attempts. If it cannot be reached, set KERAS_VIT_MIRROR to "
        f"a folder that has the file. The last attempt: {failure}."
    ) from failure


def _attempt(url: str, part: Path, expected: Expected, name: str) -> Expected:
    """Request the missing bytes once, append them to `part`, and return `expected` completed by the server's facts."""
    etag = _etag_file(part).read_text("latin-1") if part.exists() and _etag_file(part).exists() else ""
    offset = part.stat().st_size if STRONG_ETAG.fullmatch(etag) else 0
    headers = {"Accept-Encoding": "identity"}
    if offset:
        headers |= {"Range": f"bytes={offset}-", "If-Range": etag}
    with _get(url, headers) as response:
        if response.status_code == 416:
            _discard(part)
        _require_success(response)
        if response.status_code != 206:
            offset = 0
        length = _total_length(response, offset)
        if length is not None and expected.size not in (None, length):
            raise CorruptFileError(f"the server states {length:,} bytes, expected {expected.size:,}")
        size = expected.size if length is None else length
        stated = replace(expected, size=size, checksums=_stated_checksums(response.headers))
        if not stated.can_verify(Path(name).suffix):
            raise DownloadError(
                f"{url}: the server states neither a length nor a checksum, so damage could not be detected."
                " Add the file's hash to the end of the URL: #sha256=<hex>."
            )
        can_resume = stated.checks_content(Path(name).suffix)
        if not offset:
            _restart(part, response.headers.get("ETag", "") if can_resume else "")
        elif not can_resume:
            raise CorruptFileError("the server no longer states a checksum of the part that was received before")
        received = _append(response, part, stated.size, name)
    if stated.size is not None and received < stated.size:
        raise TransientError(f"the transfer ended after {received:,} of {stated.size:,} bytes")
    return stated


@contextmanager
def _get(url: str, headers: Mapping[str, str]) -> Iterator["requests.Response"]:
    """Open a response; network failures while it is open become a `TransientError` or a DownloadError."""
    import requests
    import urllib3

    unreachable = (urllib3.exceptions.ConnectTimeoutError, urllib3.exceptions.ProxyError)
    transient = (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError)
    try:
        with requests.Session() as session, _before_deadline(_follow, session, url, headers) as response:
            yield response
    except transient as error:
        if isinstance(getattr(error.args[0] if error.args else None, "reason", None), unreachable):
            raise UnreachableError(no_connection(urlsplit(url).hostname)) from error
        raise TransientError(f"{type(error).__name__}: {error}") from error
    except (requests.RequestException, ValueError) as error:  # ValueError: addresses and headers that cannot be parsed
        raise DownloadError(f"{url} cannot be requested: {str(error)[:300]}") from error


def no_connection(host: str | None) -> str:
    """Return the message about a host that cannot be reached."""
    return (
        f"There is no connection to {host}. Without a network, use the model 'digits' or the path of a file; "
        "KERAS_VIT_OFFLINE=1 uses only files that were downloaded before."
    )


def _follow(session: "requests.Session", url: str, headers: Mapping[str, str]) -> "requests.Response":
    """Request a URL and follow its redirects, but not from https to http, which others can read and change."""
    # Without this, requests looks for the target itself, and reads the body of a redirect, which can have any length.
    vars(session)["get_redirect_target"] = lambda _: None
    for _ in range(MAX_REDIRECTS + 1):
        response = session.get(url, headers=headers, stream=True, timeout=STALL, allow_redirects=False)
        if not response.is_redirect:
            return response
        response.close()
        target = urljoin(url, response.headers["Location"].encode("latin-1").decode())
        if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
            raise DownloadError(f"{url} is redirected to {target[:200]}, which is not encrypted (https).")
        url = target
    raise DownloadError(f"{url} is redirected more than {MAX_REDIRECTS} times.")


def _before_deadline(request: Callable[..., "requests.Response"], *arguments: Any) -> "requests.Response":
    """Wait for a function in a thread until the deadline for headers: the timeout of requests is for single reads."""
    answer: Future[requests.Response] = Future()

    def call() -> None:
        try:
            answer.set_result(request(*arguments))
        except Exception as error:  # raised in the calling thread
            answer.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    try:
        return answer.result(timeout=HEADER_DEADLINE)
    except TimeoutError:
        answer.add_done_callback(lambda late: None if late.exception() else late.result().close())
        raise TransientError(f"the server sent no complete headers in {HEADER_DEADLINE:g} seconds") from None


def _require_success(response: "requests.Response") -> None:
    status = response.status_code
    if status in UNAVAILABLE_STATUS:
        raise FileUnavailableError(
            f"{response.url} answered {status} {response.reason}: no such file there, or no access to it."
        )
    if status in TRANSIENT_STATUS:
        raise TransientError(f"the server answered {status} {response.reason}")
    if status not in (200, 206):
        raise DownloadError(f"{response.url} answered {status} {response.reason} instead of a file.")


def _total_length(response: "requests.Response", offset: int) -> int | None:
    """Return the length of the whole file that the response states, and check that its bytes begin at `offset`."""
    if response.status_code == 206:
        content_range = response.headers.get("Content-Range", "")
        match = re.fullmatch("bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})", content_range)
        if match is None or int(match[1]) != offset:
            raise CorruptFileError(f"the server did not send the requested range, from byte {offset}")
        return int(match[2])
    length = response.headers.get("Content-Length", "")
    return int(length) if re.fullmatch("[0-9]{1,18}", length) else None


def _stated_checksums(headers: Mapping[str, str]) -> dict[str, bytes]:
    """Return the checksums that Google's storage states: `x-goog-hash: crc32c=<base64>,md5=<base64>`."""
    pairs = re.findall(r"\b(md5|crc32c)=([A-Za-z0-9+/]+=*)", headers.get("x-goog-hash", ""))
    return {algorithm: base64.b64decode(digest) for algorithm, digest in pairs}


def _etag_file(part: Path) -> Path:
    return part.with_name(part.name + ".etag")


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _etag_file(part).unlink(missing_ok=True)


def _restart(part: Path, etag: str) -> None:
    """Discard `part`, and store a strong ETag, which identifies this version of the file (RFC 9110, 13.1.5)."""
    _discard(part)
    if STRONG_ETAG.fullmatch(etag):
        _etag_file(part).write_text(etag)


def _append(response: "requests.Response", part: Path, length: int | None, name: str) -> int:
    """Append the body to `part`, with a progress bar, and return the length of `part`."""
    try:
        with part.open("ab") as file, counter(name, total=length, done=file.tell(), in_bytes=True) as advance:
            for chunk in _chunks(response):
                file.write(chunk)
                advance(len(chunk))
                if length is not None and file.tell() > length:
                    raise CorruptFileError(f"the server sent more than {length:,} bytes")
            file.flush()
            os.fsync(file.fileno())
            return file.tell()
    except OSError:  # a disk error (network errors are urllib3's): free the space of a full disk
        _discard(part)
        raise


def _chunks(response: "requests.Response") -> Iterator[bytes]:
    """Yield the body as it arrives; raise a `TransientError` if it is too slow."""
    start, received = time.monotonic(), 0
    while chunk := response.raw.read1(CHUNK, decode_content=False):
        yield chunk
        received += len(chunk)
        if (seconds := time.monotonic() - start) >= SLOW_PERIOD:
            if received < SLOWEST * seconds:
                raise TransientError(f"{received:,} bytes were received in {seconds:.0f} seconds")
            start, received = time.monotonic(), 0
