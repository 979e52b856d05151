"""Download one file over HTTP, with retries, resumption, a stall limit and verification.

The package pooch verifies a hash that is known beforehand; it does not resume, limit stalls or read server checksums.
"""

import base64
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from keras_vit._util.integrity import CorruptFileError, Expected, verify
from keras_vit._util.progress import counter
from keras_vit.errors import DownloadError, FileUnavailableError

if TYPE_CHECKING:
    import requests

ATTEMPTS = 5
BACKOFF = 1.0  # seconds before the second attempt; doubled before each later one
STALL = 20.0  # seconds without a byte or a connection after which an attempt fails
CHUNK = 1 << 18
UNAVAILABLE_STATUS = (401, 403, 404, 410)
TRANSIENT_STATUS = (408, 416, 425, 429, 500, 502, 503, 504)


class TransientError(Exception):
    """A failure after which another attempt may succeed."""


def download(url: str, part: Path, expected: Expected, name: str) -> str:
    """Download a file to `part`, verify it, flush it to disk, and return its SHA-256 (hexadecimal).

    An incomplete `part` is resumed, also by a later process. `expected` is completed by the server's length and
    checksums. The suffix of `name` decides how the file is checked. The statuses 401, 403, 404 and 410 raise a
    FileUnavailableError at once; `ATTEMPTS` failures or wrong content twice a DownloadError; a full disk an OSError.
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
            failure = error
    raise DownloadError(
        f"{url} could not be downloaded in {ATTEMPTS} attempts. If it cannot be reached, set KERAS_VIT_MIRROR to "
        f"a folder that has the file. The last attempt: {failure}."
    ) from failure


def _attempt(url: str, part: Path, expected: Expected, name: str) -> Expected:
    """Request the missing bytes once, append them to `part`, and return `expected` completed by the server's facts."""
    etag = _etag_file(part)
    offset = part.stat().st_size if part.exists() and etag.exists() else 0
    headers = {"Accept-Encoding": "identity"}
    if offset:
        headers |= {"Range": f"bytes={offset}-", "If-Range": etag.read_text()}
    with _get(url, headers) as response:
        if response.status_code == 416:
            _discard(part)
        _require_success(response)
        if response.status_code != 206:
            offset = 0
        length = _total_length(response, offset)
        if length is not None and expected.size not in (None, length):
            raise CorruptFileError(f"the server states {length:,} bytes, expected {expected.size:,}")
        stated = replace(
            expected,
            size=expected.size if length is None else length,
            checksums=_stated_checksums(response.headers),
        )
        if not stated.can_verify(Path(name).suffix):
            raise DownloadError(
                f"{url}: the server states neither a length nor a checksum, so damage could not be detected."
                " Add the file's hash to the end of the URL: #sha256=<hex>."
            )
        if not offset:
            _restart(part, response.headers)
        received = _append(response, part, stated.size, name)
    if stated.size is not None and received < stated.size:
        raise TransientError(f"the transfer ended after {received:,} of {stated.size:,} bytes")
    return stated


@contextmanager
def _get(url: str, headers: Mapping[str, str]) -> Iterator["requests.Response"]:
    """Open a response; network failures while it is open become a `TransientError`."""
    import requests
    import urllib3

    transient = (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError)
    try:
        with requests.get(url, headers=headers, stream=True, timeout=STALL) as response:
            yield response
    except transient as error:
        raise TransientError(f"{type(error).__name__}: {error}") from error
    except requests.RequestException as error:
        raise DownloadError(f"{url} cannot be requested: {error}") from error


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
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        if match is None or int(match[1]) != offset:
            raise CorruptFileError(f"the server did not send the requested range, from byte {offset}")
        return int(match[2])
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _stated_checksums(headers: Mapping[str, str]) -> dict[str, bytes]:
    """Return the checksums that Google's storage states: `x-goog-hash: crc32c=<base64>,md5=<base64>`."""
    pairs = re.findall(r"\b(md5|crc32c)=([A-Za-z0-9+/]+=*)", headers.get("x-goog-hash", ""))
    return {algorithm: base64.b64decode(digest) for algorithm, digest in pairs}


def _etag_file(part: Path) -> Path:
    return part.with_name(part.name + ".etag")


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _etag_file(part).unlink(missing_ok=True)


def _restart(part: Path, headers: Mapping[str, str]) -> None:
    """Discard `part`, and store the validator that identifies this version of the file (RFC 9110, 13.1.5)."""
    _discard(part)
    validator = headers.get("ETag", headers.get("Last-Modified", "W/"))
    if not validator.startswith("W/"):  # weak validators do not promise equal bytes
        _etag_file(part).write_text(validator)


def _append(response: "requests.Response", part: Path, length: int | None, name: str) -> int:
    """Append the body to `part`, with a progress bar, and return the length of `part`."""
    try:
        with part.open("ab") as file, counter(name, total=length, done=file.tell(), in_bytes=True) as advance:
            for chunk in response.raw.stream(CHUNK, decode_content=False):
                file.write(chunk)
                advance(len(chunk))
            file.flush()
            os.fsync(file.fileno())
            return file.tell()
    except OSError:  # a disk error (network errors are urllib3's): free the space of a full disk
        _discard(part)
        raise
