"""Download files into the cache folder, and verify them; docs/environment.md has the sources, checks and variables.

The copy of `https://host/folder/X.npz` is `<cache>/https/host/folder/X.npz`. A file gets this name only when it is
complete and verified. Its pin, the file `X.npz.sha256`, has its SHA-256, size and modification time: if size and time
are unchanged, the file is not read again.
"""

import base64
import errno
import hashlib
import os
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote, urldefrag, urlsplit
from urllib.request import url2pathname

import requests
from filelock import FileLock

from keras_vit._util.checks import expand_home
from keras_vit._util.files import cache_folder, replacing
from keras_vit._util.progress import counter
from keras_vit.errors import DownloadError, FileUnavailableError, LicenseError

HUB_SOURCE = re.compile(r"hf://(?P<repo>[^/@]+/[^/@]+)/(?P<path>[^@]+)(@(?P<revision>.+))?")
HUB = "https://huggingface.co"
WEB_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html|head|body|script)\b", re.IGNORECASE)
# Characters of cached file names that are not percent-encoded, besides letters, digits and _.-
UNQUOTED = " +,=@()~"
ATTEMPTS = 5
BACKOFF = 1.0  # seconds before the second attempt; doubled before each later one
TIMEOUT = 20.0  # seconds without a byte or a connection after which an attempt fails
CHUNK = 1 << 18
UNAVAILABLE_STATUS = (401, 403, 404, 410)
TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)
_REMOTE_CHECKPOINT = re.compile(
    r"(?P<folder>(?:https?|gs|hf)://.+/)(?:[^/]+\.safetensors|pytorch_model\.bin)(?P<revision>@[^#]+)?(?:#.*)?"
)
_REACHED: set[str] = set()  # servers that this process has reached


class Remote(NamedTuple):
    """A remote file and the places of its copies."""

    url: str  # http://, https:// or hf://
    cached: Path  # in the cache folder
    mirrored: list[str]  # paths in a mirror: the whole path, the path without the bucket, the file name


def fetch(source: str, *, sha256: str | None = None, beside: Sequence[str] = ()) -> Path:
    """Download and verify a file if needed; return its local path.

    `source` is a local path, or a `file://`, `https://`, `http://`, `gs://` or `hf://` URL, which may end in
    `#sha256=<hex>`. A file that cannot be downloaded or has another SHA-256 raises a DownloadError; a missing local
    path a FileNotFoundError; a malformed source or hash a ValueError. `beside` are sources that are fetched next: the
    error of a file that is missing offline names those too.
    """
    source, fragment = urldefrag(source) if "://" in source else (source, "")
    hashes = {text.lower() for text in (sha256, fragment.removeprefix("sha256=")) if text}
    if len(hashes) > 1:
        raise ValueError(f"sha256={sha256} and #{fragment} contradict each other.")
    known = "".join(hashes) or None
    if known and not re.fullmatch("[0-9a-f]{64}", known):
        raise ValueError(f"A SHA-256 must be 64 hexadecimal digits (in a URL: #sha256=<hex>). Received: {known}")
    local = _local_path(source)
    if local is None:
        return _fetch_remote(_locate(source), known, list(map(_locate, beside)))
    if not local.exists():
        raise FileNotFoundError(f"There is no file or folder {local.absolute()}.")
    return _verified(local, known)


def fetch_with(source: str, names: Sequence[str], *, needed: str = "", sha256: str | None = None) -> list[Path]:
    """Fetch a checkpoint, and the files of these names beside it; return their paths, the checkpoint's first.

    Only the `needed` one must be there. Errors are those of `fetch`.
    """
    beside = beside_urls(source, [needed] if needed else [])
    return [fetch(source, sha256=sha256, beside=beside), *fetch_beside(source, names, needed=needed)]


def fetch_beside(source: str, names: Sequence[str], *, needed: str = "") -> list[Path]:
    """Fetch the files of these names beside a remote .safetensors file; only the `needed` one must be there."""
    paths = []
    for name, url in zip(names, beside_urls(source, names), strict=False):
        with nullcontext() if name == needed else suppress(FileUnavailableError):
            paths.append(fetch(url))
    return paths


def beside_urls(source: str, names: Sequence[str]) -> list[str]:
    """List the URLs of files beside a remote checkpoint of the hub's kind; none beside another."""
    match = _REMOTE_CHECKPOINT.fullmatch(source)
    return [f"{match['folder']}{name}{match['revision'] or ''}" for name in names] if match else []


def check_license(source: str, name: str, license: str, terms: str | None, *, is_accepted: bool) -> None:
    """Raise a LicenseError for a remote file with terms that are not accepted, unless there is a copy of it already."""
    if terms and not is_accepted and not _is_cached(source):
        raise LicenseError(
            f"{name} has terms of its own ({license}): read {terms} and, if you accept them, load it with "
            "accept_license=True (--accept-license)."
        )


def _is_cached(source: str) -> bool:
    """Look for a copy of a remote file in the cache, or in the hub's."""
    if (hub := HUB_SOURCE.fullmatch(source)) and not os.environ.get("KERAS_VIT_MIRROR"):
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(hub["repo"], hub["path"], revision=hub["revision"]), str)
    return _locate(source).cached.exists()


def _local_path(source: str) -> Path | None:
    """Convert a source or mirror to a local path; None if it is remote."""
    if source.startswith("file://"):
        return Path(url2pathname(urlsplit(source).path))
    return None if "://" in source else expand_home(source)


def _locate(source: str) -> Remote:
    """Find the URL of a remote source and the path of its copy, always inside the cache folder."""
    scheme, _, rest = source.partition("://")
    if scheme == "gs":
        return _locate(f"https://storage.googleapis.com/{quote(rest)}")
    url = urlsplit(source)
    if hub := HUB_SOURCE.fullmatch(source):  # a revision is part of its repository's name
        repo = hub["repo"] + (f"@{hub['revision']}" if hub["revision"] else "")
        parts = ["hf", *repo.split("/", 1), *hub["path"].split("/")]
    elif scheme in ("http", "https"):
        host = (url.hostname or "") + (f"+{url.port}" if url.port else "")
        parts = [scheme, host, *(unquote(part) for part in url.path.removeprefix("/").split("/"))]
    else:
        raise ValueError(
            "Expected a path, or a URL: file://path, https://host/path, http://host/path, gs://bucket/object"
            f" or hf://org/repo/path[@revision]. Received: {source}"
        )
    if {"", ".", ".."} & {*parts}:
        raise ValueError(f"A URL must name a host and a file, without empty or dotted parts. Received: {source}")
    names = [quote(part, safe=UNQUOTED) for part in parts]
    folder = cache_folder().joinpath(*names[:-1])
    if url.query:  # files may differ in their queries alone
        folder /= hashlib.sha256(source.encode()).hexdigest()[:12]
    below = names[1:] if hub else names[2:]
    mirrored = ["/".join(path) for path in (below, below[1:], below[-1:]) if path]
    return Remote(source, folder / names[-1], list(dict.fromkeys(mirrored)))


def _fetch_remote(remote: Remote, sha256: str | None, beside: list[Remote]) -> Path:
    """Get a remote file from, in this order, a mirror folder, the cache, the hub, a mirror's URL or its own URL."""
    mirror = os.environ.get("KERAS_VIT_MIRROR", "").rstrip("/")
    folder = _local_path(mirror) if mirror else None
    copies = [folder / path for path in remote.mirrored] if folder is not None else []
    for copy in copies:
        if copy.is_file():
            return _verified(copy, sha256)
    if _is_intact(remote.cached, sha256):
        return remote.cached
    if folder is not None and not folder.is_dir():
        raise FileUnavailableError(f"KERAS_VIT_MIRROR={folder} is not a folder. It is searched for {remote.url}.")
    if copies:
        raise FileUnavailableError(
            f"KERAS_VIT_MIRROR does not have {remote.url}. Looked for: {', '.join(map(str, copies))}."
        )
    if remote.url.startswith("hf://") and not mirror:
        return _verified(_from_hub(remote, beside), sha256)
    if _offline():
        raise FileUnavailableError(_offline_message(remote, beside))
    return _into_cache(remote, [f"{mirror}/{path}" for path in remote.mirrored] if mirror else [remote.url], sha256)


def _offline() -> bool:
    switches = (os.environ.get(name, "").strip().lower() for name in ("KERAS_VIT_OFFLINE", "HF_HUB_OFFLINE"))
    return any(switch not in ("", "0", "false", "no", "off") for switch in switches)


def _offline_message(remote: Remote, beside: list[Remote]) -> str:
    missing = [other for other in beside if not (other.cached.exists() or _is_cached(other.url))]
    return (
        f"{remote.cached.name} is {'damaged' if remote.cached.exists() else 'not'} in the cache, and KERAS_VIT_OFFLINE"
        f" or HF_HUB_OFFLINE forbids the network. {_by_hand([remote, *missing])}"
    )


def _no_connection(host: str | None, remotes: list[Remote]) -> str:
    return (
        f"There is no connection to {host}. Without a network, use the model 'digits', the path of a file, or "
        "KERAS_VIT_MIRROR, a folder with the files; KERAS_VIT_OFFLINE=1 uses only files that were downloaded before. "
        + _by_hand(remotes)
    )


def _by_hand(remotes: list[Remote]) -> str:
    """Say from where files can be downloaded by other programs, and under which names they are found."""
    return f"Download elsewhere and save {', and '.join(f'{_address(each)} as {each.cached}' for each in remotes)}."


def _address(remote: Remote) -> str:
    hub = HUB_SOURCE.fullmatch(remote.url)
    return f"{HUB}/{hub['repo']}/resolve/{hub['revision'] or 'main'}/{hub['path']}" if hub else remote.url


def _has_connection(endpoint: str) -> bool:
    """Try once to reach a server, whatever it answers; one that was reached is not asked again."""
    if endpoint not in _REACHED:
        try:
            requests.head(endpoint, timeout=TIMEOUT).close()
        except (requests.ConnectionError, requests.Timeout):
            return False
        _REACHED.add(endpoint)
    return True


def _from_hub(remote: Remote, beside: list[Remote]) -> Path:
    """Get a file of the Hugging Face Hub, cached and verified by the hub's own package."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

    hub = HUB_SOURCE.fullmatch(remote.url)
    assert hub
    # The hub's package would try six times, with a line for each, before it looks for a copy.
    is_local = _offline() or not _has_connection(constants.ENDPOINT)
    try:
        path = hf_hub_download(hub["repo"], hub["path"], revision=hub["revision"], local_files_only=is_local)
    except LocalEntryNotFoundError as error:
        if _offline():
            raise FileUnavailableError(_offline_message(remote, beside)) from error
        raise DownloadError(_no_connection(urlsplit(constants.ENDPOINT).hostname, [remote, *beside])) from error
    except (EntryNotFoundError, RepositoryNotFoundError) as error:
        advice = f" If it exists, accept its terms at {HUB}/{hub['repo']} and log in with `hf auth login`."
        is_denied = isinstance(error, RepositoryNotFoundError)  # does not exist, is private, or has terms to accept
        raise FileUnavailableError(f"{remote.url}: {error}{advice if is_denied else ''}") from error
    except (OSError, ValueError) as error:
        raise DownloadError(f"{remote.url}: {error}") from error
    return Path(path)


def _into_cache(remote: Remote, urls: list[str], sha256: str | None) -> Path:
    """Download a file into the cache from the first URL that has it, unless another process has just done so."""
    cached, refusals = remote.cached, []
    part = cached.with_name(cached.name + ".part")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(cached.with_name(cached.name + ".lock")):
            if _is_intact(cached, sha256):
                return cached
            for url in urls:
                try:
                    _write_pin(cached, part, _download(url, part, sha256, remote))
                    return part.replace(cached)
                except FileUnavailableError as error:
                    refusals.append(str(error))
    except DownloadError:
        raise
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "Free some space, or set" if is_full else "Set"
        raise DownloadError(
            f"{remote.url} cannot be saved as {cached}: {error}. {advice} KERAS_VIT_CACHE to a writable folder."
        ) from error
    raise FileUnavailableError(f"{cached.name} is not available. " + " ".join(refusals))


def _download(url: str, part: Path, sha256: str | None, remote: Remote) -> str:
    """Download a file to `part`, continue what an earlier attempt or process left there, and return its SHA-256."""
    for attempt in range(ATTEMPTS):
        time.sleep(BACKOFF * 2 ** (attempt - 1) if attempt else 0)
        is_resumed = part.exists()
        try:
            md5 = _transfer(url, part, sha256)
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            # urllib3's MaxRetryError, which has a `reason`, says that no connection was made.
            if not attempt and hasattr(error.args[0] if error.args else None, "reason"):
                raise DownloadError(_no_connection(urlsplit(url).hostname, [remote])) from error
            failure: Exception = error
        except (requests.RequestException, ValueError) as error:  # ValueError: addresses that cannot be parsed
            raise DownloadError(f"{url} cannot be requested: {str(error)[:300]}") from error
        else:
            try:
                return _verify(part, url, sha256, md5)
            except DownloadError as error:
                part.unlink()
                if not is_resumed:  # else the parts may be of two versions of the file
                    raise
                failure = error
    raise DownloadError(
        f"{url} could not be downloaded in {ATTEMPTS} attempts. If it cannot be reached, set KERAS_VIT_MIRROR to "
        f"a folder that has the file. The last attempt: {failure}."
    ) from failure


def _transfer(url: str, part: Path, sha256: str | None) -> str | None:
    """Request the missing bytes once and append them to `part`; return the MD5 that Google's storage states."""
    done = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
        status, answer = response.status_code, f"{response.url} answered {response.status_code} {response.reason}"
        if url.startswith("https:") and not response.url.startswith("https:"):
            raise DownloadError(f"{url} redirects from https to {response.url}.")
        if status in UNAVAILABLE_STATUS:
            raise FileUnavailableError(f"{answer}: no such file there, or no access to it.")
        stated = re.search(r"\bmd5=([A-Za-z0-9+/]{22}==)", response.headers.get("x-goog-hash", ""))
        md5 = base64.b64decode(stated[1]).hex() if stated else None
        if done and (status == 416 or (status == 206 and not (sha256 or md5))):
            part.unlink()  # without a hash, parts of two versions of the file could be joined
            return _transfer(url, part, sha256)
        if status in TRANSIENT_STATUS:
            raise requests.ConnectionError(answer)
        if status not in (200, 206):
            raise DownloadError(f"{answer} instead of a file.")
        length = response.raw.length_remaining  # None if the server does not state it
        if length is None and not (response.raw.chunked or sha256 or md5):
            raise DownloadError(
                f"{url}: the server states neither a length nor a checksum, so damage could not be detected. Add the "
                "file's hash to the end of the URL: #sha256=<hex>."
            )
        done = done if status == 206 else 0
        total = None if length is None else done + length
        with (
            part.open("ab" if done else "wb") as file,
            counter(part.stem, total=total, done=done, in_bytes=True) as bar,
        ):
            for chunk in response.iter_content(CHUNK):
                file.write(chunk)
                bar(len(chunk))
            file.flush()
            os.fsync(file.fileno())
            if total is not None and file.tell() < total:  # urllib3 before version 2 does not say so
                raise requests.ConnectionError(f"the transfer ended after {file.tell():,} of {total:,} bytes")
    return md5


def _verify(path: Path, name: str, sha256: str | None, md5: str | None = None) -> str:
    """Compute the SHA-256 of a file; raise a DownloadError if it is a web page or not the expected file."""
    with path.open("rb") as file:
        is_page = WEB_PAGE.match(file.read(512))
        file.seek(0)
        actual = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        actual_md5 = hashlib.file_digest(file, "md5").hexdigest() if md5 and not sha256 else md5
    if is_page:
        wrong = "it is a web page, such as the login page of a network or an error page"
    elif sha256 not in (None, actual):
        wrong = f"its SHA-256 is {actual}, expected {sha256}"
    elif actual_md5 != md5:
        wrong = f"its MD5 is {actual_md5}, expected {md5}"
    else:
        return actual
    raise DownloadError(f"{name} is not the expected file: {wrong}.")


def _verified(path: Path, sha256: str | None) -> Path:
    """Check the SHA-256 of a file, if one is known."""
    if sha256:
        _verify(path, str(path), sha256)
    return path


def _pin(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _write_pin(path: Path, file: Path, sha256: str) -> None:
    """Write the pin of `path`, whose content is at `file`: `path` itself, or a file to be renamed to it."""
    stat = file.stat()
    with replacing(_pin(path)) as pin:
        pin.write(f"{sha256} {stat.st_size} {stat.st_mtime_ns}\n".encode())


def _is_intact(path: Path, sha256: str | None) -> bool:
    """Check a cached file: by its pin if that fits, else by verifying it, which pins it again."""
    if not path.is_file():
        return False
    pin = _pin(path).read_text().split() if _pin(path).exists() else []
    if pin[1:] == [str(path.stat().st_size), str(path.stat().st_mtime_ns)] and sha256 in (None, pin[0]):
        return True
    try:
        actual = _verify(path, path.name, sha256 or "".join(pin[:1]) or None)
    except DownloadError:
        return False
    with suppress(OSError):  # a read-only cache works without a pin
        _write_pin(path, path, actual)
    return True
