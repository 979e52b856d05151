"""One file over HTTP, whatever the server does: retries, resumption, a stall limit, nothing unverified.

pooch checks a hash that is known beforehand, and has none of the first three nor a lock: hence this file.
"""

import base64
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit._util.integrity import CorruptFile, Expected, verify
from keras_vit.errors import DownloadError, FileUnavailableError

if TYPE_CHECKING:
    import requests

ATTEMPTS = 5
BACKOFF = 1.0  # seconds before the second attempt, doubled for each further one
STALL = 20.0  # seconds without a byte (or without a connection) after which an attempt is given up
CHUNK = 1 << 18
NOT_THERE = (401, 403, 404, 410)
PASSING = (408, 416, 425, 429, 500, 502, 503, 504)


class PassingError(Exception):
    """A failure that may be gone at the next attempt."""


def download(url: str, part: Path, expected: Expected, name: str) -> str:
    """Bring a file to `part`, complete, verified and flushed to disk; what `part` holds already is resumed.

    Args:
        url: http:// or https:// address.
        part: where the bytes go. `<part>.etag` beside it holds what a later process needs to resume it.
        expected: what is known of the file; what the server states of it is added.
        name: the file's final name: its suffix says how it can check itself, and the progress bar shows it.

    Returns:
        The file's SHA-256.

    Raises:
        FileUnavailableError: 401, 403, 404 or 410, at once.
        DownloadError: wrong bytes twice, or no success in `ATTEMPTS` attempts.
        OSError: the disk is full or cannot be written.
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
        except CorruptFile as error:
            _discard(part)  # it may be the resumption or the line; once more, from zero, it is the server
            if wrong_before:
                raise DownloadError(f"{url} came twice with wrong content: {error}.") from error
            wrong_before, failure = True, error
        except PassingError as error:
            failure = error
    raise DownloadError(
        f"{url} could not be downloaded in {ATTEMPTS} attempts. Where there is no way to it, KERAS_VIT_MIRROR names a "
        f"folder that has the file. The last attempt: {failure}."
    ) from failure


def _attempt(url: str, part: Path, expected: Expected, name: str) -> Expected:
    """Make `part` as long as the server says it is, in one request.

    Returns:
        `expected`, and what the server stated about the file.
    """
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
            raise CorruptFile(f"the server states {length:,} bytes, expected {expected.size:,}")
        stated = replace(
            expected,
            size=expected.size if length is None else length,
            checksums=_stated_checksums(response.headers),
        )
        if not stated.can_verify(Path(name).suffix):
            raise DownloadError(
                f"{url}: the server states neither a length nor a checksum, so a damaged copy could not be"
                " told from a good one. Give the file's hash: add #sha256=<hex> to the end of the URL."
            )
        if not offset:
            _start_afresh(part, response.headers)
        received = _append(response, part, stated.size, name)
    if stated.size is not None and received < stated.size:
        raise PassingError(f"the transfer ended after {received:,} of {stated.size:,} bytes")
    return stated


@contextmanager
def _get(url: str, headers: Mapping[str, str]) -> Iterator["requests.Response"]:
    """An open response; network failures while it is open become `PassingError`."""
    import requests
    import urllib3

    passing = (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError)
    try:
        with requests.get(url, headers=headers, stream=True, timeout=STALL) as response:
            yield response
    except passing as error:
        raise PassingError(f"{type(error).__name__}: {error}") from error
    except requests.RequestException as error:
        raise DownloadError(f"{url} cannot be asked for: {error}") from error


def _require_success(response: "requests.Response") -> None:
    status = response.status_code
    if status in NOT_THERE:
        raise FileUnavailableError(
            f"{response.url} answered {status} {response.reason}: no such file there, or no access to it."
        )
    if status in PASSING:
        raise PassingError(f"the server answered {status} {response.reason}")
    if status not in (200, 206):
        raise DownloadError(f"{response.url} answered {status} {response.reason}, which is no file.")


def _total_length(response: "requests.Response", offset: int) -> int | None:
    """The length of the whole file as the response states it; the response's bytes must begin at `offset`."""
    if response.status_code == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        if match is None or int(match[1]) != offset:
            raise CorruptFile(f"the server sent another range than was asked for, from byte {offset}")
        return int(match[2])
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _stated_checksums(headers: Mapping[str, str]) -> dict[str, bytes]:
    """What Google's storage states of the whole object: `x-goog-hash: crc32c=<base64>,md5=<base64>`."""
    pairs = re.findall(r"\b(md5|crc32c)=([A-Za-z0-9+/]+=*)", headers.get("x-goog-hash", ""))
    return {algorithm: base64.b64decode(digest) for algorithm, digest in pairs}


def _etag_file(part: Path) -> Path:
    return part.with_name(part.name + ".etag")


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _etag_file(part).unlink(missing_ok=True)


def _start_afresh(part: Path, headers: Mapping[str, str]) -> None:
    """Empty `part`, and note what tells this version of the file from others (RFC 9110, 13.1.5)."""
    _discard(part)
    validator = headers.get("ETag", headers.get("Last-Modified", "W/"))
    if not validator.startswith("W/"):  # equal weak validators do not mean equal bytes
        _etag_file(part).write_text(validator)


def _append(response: "requests.Response", part: Path, length: int | None, name: str) -> int:
    """Write the body to the end of `part`, with a progress bar on a terminal; the length of `part` then."""
    from tqdm import tqdm

    look: dict[str, Any] = {
        "desc": name,
        "unit": "B",
        "unit_scale": True,
        "file": sys.stderr,
        "disable": None,
    }
    try:
        with part.open("ab") as file, tqdm(total=length, initial=file.tell(), **look) as bar:
            for chunk in response.raw.stream(CHUNK, decode_content=False):
                file.write(chunk)
                bar.update(len(chunk))
            file.flush()
            os.fsync(file.fileno())
            return file.tell()
    except OSError:  # the disk's, for the network's are urllib3's: a full one needs the space back
        _discard(part)
        raise
