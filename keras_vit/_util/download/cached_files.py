"""Find, download and keep files in the cache folder.

The copy of `https://host/folder/X.npz` is `<cache>/https/host/folder/X.npz`. A file gets this name only when it is
complete and verified.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote, urldefrag, urlsplit
from urllib.request import url2pathname

from filelock import FileLock

from keras_vit._util.download.integrity import CorruptFileError, Expected, is_intact, verify, write_pin
from keras_vit._util.download.transfer import download, no_connection
from keras_vit._util.text import install_command
from keras_vit.errors import DownloadError, FileUnavailableError, LicenceError

STORAGE = "https://storage.googleapis.com/"
HUB_SOURCE = re.compile(r"hf://(?P<org>[^/@]+)/(?P<repo>[^/@]+)/(?P<path>[^@]+)(@(?P<revision>.+))?")
# Characters of cached file names that are not percent-encoded, besides letters, digits and _.-
UNQUOTED = " +,=@()~"


class Remote(NamedTuple):
    """A remote file and the places of its copies."""

    url: str  # http://, https:// or hf://
    cached: Path  # in the cache folder
    mirrored: list[str]  # paths in a mirror: the whole path, the path without the bucket, the file name


def cache_folder() -> Path:
    """Return the folder for downloaded files, which may not exist yet."""
    if folder := os.environ.get("KERAS_VIT_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser() / "keras_vit"


def fetch(source: str, *, sha256: str | None = None, size: int | None = None) -> Path:
    """Return the local path of a file, after downloading and verifying it if needed.

    `source` is a local path, or a `file://`, `https://`, `http://`, `gs://` or `hf://` URL, which may end in
    `#sha256=<hex>`. A file that cannot be downloaded, or has another SHA-256 or size in bytes, raises a DownloadError;
    a missing local path a FileNotFoundError; a malformed source or hash a ValueError.
    """
    source, fragment = urldefrag(source) if "://" in source else (source, "")
    expected = Expected(_one_hash(sha256, fragment), size)
    local = _local_path(source)
    return _fetch_remote(_locate(source), expected) if local is None else _verify_local(local, expected)


def _is_cached(source: str) -> bool:
    return _locate(source).cached.exists()


def check_licence(name: str, source: str, licence: str, terms: str | None, *, is_accepted: bool) -> None:
    """Raise a LicenceError for a remote file with terms of its own, unless they are accepted or it is in the cache."""
    if terms and not is_accepted and not _is_cached(source):
        raise LicenceError(
            f"{name} has terms of its own ({licence}): read {terms} and, if you accept them, load it with "
            "accept_licence=True (--accept-licence)."
        )


def _one_hash(sha256: str | None, fragment: str) -> str | None:
    """Return the SHA-256 that was given as an argument or as the URL's fragment, in lower case."""
    given = {text.lower() for text in (sha256, fragment.removeprefix("sha256=")) if text}
    if len(given) > 1:
        raise ValueError(f"sha256={sha256} and #{fragment} contradict each other.")
    known = given.pop() if given else None
    if known and not re.fullmatch("[0-9a-f]{64}", known):
        raise ValueError(f"A SHA-256 must be 64 hexadecimal digits (in a URL: #sha256=<hex>). Received: {known}")
    return known


def _local_path(source: str) -> Path | None:
    """Return a source or mirror as a local path; None if it is remote."""
    if source.startswith("file://"):
        return Path(url2pathname(urlsplit(source).path))
    return None if "://" in source else Path(source).expanduser()


def _verify_local(path: Path, expected: Expected) -> Path:
    """Check a local file against `expected`, and return its path."""
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {path.absolute()}.")
    if expected != Expected():
        try:
            verify(path, expected)
        except CorruptFileError as error:
            raise DownloadError(f"{path} is not the expected file: {error}.") from error
    return path


def _locate(source: str) -> Remote:
    """Return the URL of a remote source and the path of its copy, always inside the cache folder."""
    scheme, _, rest = source.partition("://")
    if scheme == "gs":
        return _locate(STORAGE + quote(rest))
    url = urlsplit(source)
    if hub := HUB_SOURCE.fullmatch(source):  # a revision is part of its repository's name
        revision = f"@{hub['revision']}" if hub["revision"] else ""
        place = ["hf"]
        parts = [hub["org"], hub["repo"] + revision, *hub["path"].split("/")]
    elif scheme in ("http", "https"):
        place = [scheme, (url.hostname or "") + (f"+{url.port}" if url.port else "")]
        parts = [unquote(part) for part in url.path.removeprefix("/").split("/")]
    else:
        raise ValueError(
            "Expected a path, or a URL: file://path, https://host/path, http://host/path, gs://bucket/object"
            f" or hf://org/repo/path[@revision]. Received: {source}"
        )
    if {"", ".", ".."} & {*place, *parts}:
        raise ValueError(f"A URL must name a host and a file, without empty or dotted parts. Received: {source}")
    names = [quote(part, safe=UNQUOTED) for part in (*place, *parts)]
    folder = cache_folder().joinpath(*names[:-1])
    if url.query:  # files may differ in their queries alone
        folder /= hashlib.sha256(source.encode()).hexdigest()[:12]
    parts = names[len(place) :]
    paths = ["/".join(path) for path in (parts, parts[1:], parts[-1:]) if path]
    return Remote(source, folder / names[-1], list(dict.fromkeys(paths)))


def _fetch_remote(remote: Remote, expected: Expected) -> Path:
    """Return a remote file from, in this order, a mirror folder, the cache, the hub, a mirror's URL or its own URL."""
    mirror = os.environ.get("KERAS_VIT_MIRROR", "").rstrip("/")
    folder = _local_path(mirror) if mirror else None
    copies = [folder / path for path in remote.mirrored] if folder is not None else []
    for copy in copies:
        if copy.is_file():
            return _verify_local(copy, expected)
    if is_intact(remote.cached, expected):
        return remote.cached
    if copies:
        raise FileUnavailableError(
            f"KERAS_VIT_MIRROR does not have {remote.url}. Looked for: {', '.join(map(str, copies))}."
        )
    if remote.url.startswith("hf://") and not mirror:
        return _verify_local(_from_hub(remote), expected)
    if _offline():
        raise FileUnavailableError(_offline_message(remote))
    urls = [f"{mirror}/{path}" for path in remote.mirrored] if mirror else [remote.url]
    return _into_cache(remote, urls, expected)


def _offline() -> bool:
    switches = (os.environ.get(name, "").strip().lower() for name in ("KERAS_VIT_OFFLINE", "HF_HUB_OFFLINE"))
    return any(switch not in ("", "0", "false", "no", "off") for switch in switches)


def _offline_message(remote: Remote) -> str:
    damaged = "is damaged in the cache, or cannot be checked (add #sha256=<hex> to its URL)"
    return (
        f"{remote.cached.name} {damaged if remote.cached.exists() else 'is not in the cache'}, and KERAS_VIT_OFFLINE or"
        f" HF_HUB_OFFLINE forbids the network. Download {remote.url} elsewhere and save it as {remote.cached}."
    )


def _from_hub(remote: Remote) -> Path:
    """Return a file of the Hugging Face Hub, cached and verified by the hub's own package."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ImportError(f"{remote.url} needs the package huggingface_hub: {install_command('hf')}") from error
    hub = HUB_SOURCE.fullmatch(remote.url)
    assert hub
    org, repo, path, _, revision = hub.groups()
    try:
        return Path(hf_hub_download(f"{org}/{repo}", path, revision=revision, local_files_only=_offline()))
    except (OSError, ValueError) as error:
        if _offline():
            raise FileUnavailableError(_offline_message(remote)) from error
        kind = type(error).__name__
        if kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
            raise FileUnavailableError(f"{remote.url}: {error}") from error
        no_network = kind == "LocalEntryNotFoundError"
        raise DownloadError(no_connection("huggingface.co") if no_network else f"{remote.url}: {error}") from error


def _into_cache(remote: Remote, urls: list[str], expected: Expected) -> Path:
    """Download a file into the cache, unless another process has just done so."""
    cached = remote.cached
    part = cached.with_name(cached.name + ".part")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(cached.with_name(cached.name + ".lock")):
            if not is_intact(cached, expected):
                write_pin(cached, part, _from_first(urls, part, expected))
                part.replace(cached)
    except DownloadError:
        raise
    except OSError as error:
        advice = "Free some space, or set KERAS_VIT_CACHE to a writable folder."
        raise DownloadError(f"{remote.url} cannot be saved as {cached}: {error}. {advice}") from error
    return cached


def _from_first(urls: list[str], part: Path, expected: Expected) -> str:
    """Download from the first URL that has the file, and return its SHA-256."""
    refusals = []
    for url in urls:
        try:
            return download(url, part, expected)
        except FileUnavailableError as error:
            refusals.append(str(error))
    raise FileUnavailableError(f"{part.stem} is not available. " + " ".join(refusals))
