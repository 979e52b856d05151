"""Download files into a cache folder, and verify them. docs/environment.md describes the variables that are read.

| source | file |
|---|---|
| a path, `file://` | the local file |
| `https://`, `http://` | downloaded |
| `gs://bucket/object` | `https://storage.googleapis.com/bucket/object` |
| `hf://org/repo/path/in/repo[@revision]` | from the Hugging Face Hub, by the package huggingface_hub |

The copy of `https://host/folder/X.npz` is `<cache>/https/host/folder/X.npz`. A file gets this name only when it is
complete and verified: by its SHA-256 if that is known, else by the checksums that Google's storage states, else by its
own format (.npz, .keras, .zip, .pth, .pt and .bin: the CRC of each member; .safetensors and .h5: the length in the
header; .json: its syntax). Any other file must have the length that the server states; if the server states none, the
file is refused. A web page, such as the login page of a network, is never kept. A download that was interrupted is
continued only if its checks cover every byte: a hash, a stated checksum or the CRCs.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urldefrag, urlsplit
from urllib.request import url2pathname

from keras_vit._util.integrity import CorruptFileError, Expected, is_intact, verify, write_pin
from keras_vit._util.text import install_command
from keras_vit._util.transfer import download, no_connection
from keras_vit.errors import DownloadError, FileUnavailableError

__all__ = ["DownloadError", "cache_folder", "fetch", "is_cached"]

STORAGE = "https://storage.googleapis.com/"
HUB_SOURCE = re.compile(r"hf://(?P<org>[^/@]+)/(?P<repo>[^/@]+)/(?P<path>[^@]+)(@(?P<revision>.+))?")
# Characters of cached file names that are not percent-encoded, besides letters, digits and _.-
UNQUOTED = " +,=@()~"


@dataclass(frozen=True)
class Remote:
    """A remote file and the place of its copy in the cache."""

    url: str  # http://, https:// or hf://
    parts: tuple[str, ...]  # components of the path after the host, each encoded as one file name
    cached: Path

    def mirror_paths(self) -> list[str]:
        """Return the paths to search in a mirror: the whole path, the path without the bucket, the file name."""
        ways = (self.parts, self.parts[1:] or self.parts, self.parts[-1:])
        return list(dict.fromkeys("/".join(parts) for parts in ways))


def cache_folder() -> Path:
    """Return the folder for downloaded files, which may not exist yet."""
    if folder := os.environ.get("KERAS_VIT_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser() / "keras_vit"


def fetch(source: str, *, sha256: str | None = None, size: int | None = None, name: str | None = None) -> Path:
    """Return the local path of a file, after downloading and verifying it if needed.

    `source` is a local path, or a `file://`, `https://`, `http://`, `gs://` or `hf://` URL, which may end in
    `#sha256=<hex>`; `name` is the file name in the cache for a URL that does not end in one. A file that cannot be
    downloaded, or has another SHA-256 or size in bytes, is a DownloadError; a missing local path a FileNotFoundError; a
    malformed source or hash a ValueError.
    """
    source, fragment = urldefrag(source) if "://" in source else (source, "")
    expected = Expected(_one_hash(sha256, fragment), size)
    local = _local_path(source)
    return _fetch_remote(_locate(source, name), expected) if local is None else _verify_local(local, expected)


def is_cached(source: str) -> bool:
    """Return whether the copy of a remote file is in the cache."""
    return _locate(source, None).cached.exists()


def _one_hash(sha256: str | None, fragment: str) -> str | None:
    """Return the SHA-256 that was given as an argument or as the URL's fragment, in lower case."""
    given = {text.lower() for text in (sha256, fragment.removeprefix("sha256=")) if text}
    if len(given) > 1:
        raise ValueError(f"sha256={sha256} and #{fragment} contradict each other.")
    if given and not re.fullmatch("[0-9a-f]{64}", min(given)):
        raise ValueError(
            f"Expected a SHA-256 of 64 hexadecimal digits (in a URL: #sha256=<hex>). Received: {given.pop()}"
        )
    return given.pop() if given else None


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


def _locate(source: str, name: str | None) -> Remote:
    """Return the URL of a remote source and the path of its copy, always inside the cache folder."""
    scheme, _, rest = source.partition("://")
    if scheme == "gs":
        return _locate(STORAGE + quote(rest), name)
    url = urlsplit(source)
    if hub := HUB_SOURCE.fullmatch(source):  # a revision is part of its repository's name
        revision = f"@{hub['revision']}" if hub["revision"] else ""
        folders, parts = ["hf"], [hub["org"], hub["repo"] + revision, *hub["path"].split("/")]
    elif scheme in ("http", "https"):
        folders = [scheme, (url.hostname or "") + (f"+{url.port}" if url.port else "")]
        parts = [unquote(part) for part in url.path.removeprefix("/").split("/")]
    else:
        raise ValueError(
            "Expected a path, or a URL: file://path, https://host/path, http://host/path, gs://bucket/object"
            f" or hf://org/repo/path[@revision]. Received: {source}"
        )
    path = [*folders, *parts]
    if url.query or name:  # such files may differ in their queries alone
        path[-1:] = [hashlib.sha256(source.encode()).hexdigest()[:12], name or parts[-1]]
    if {"", ".", ".."} & set(path):
        raise ValueError(
            f"Expected a URL that names a host and a file, without empty or dotted parts. Received: {source}"
        )
    return Remote(source, tuple(map(_file_name, parts)), cache_folder().joinpath(*map(_file_name, path)))


def _file_name(part: str) -> str:
    return quote(part, safe=UNQUOTED)


def _fetch_remote(remote: Remote, expected: Expected) -> Path:
    """Return a remote file from, in this order, a mirror folder, the cache, the hub, a mirror's URL or its own URL."""
    mirror = os.environ.get("KERAS_VIT_MIRROR", "").rstrip("/")
    folder = _local_path(mirror) if mirror else None
    copies = [folder / path for path in remote.mirror_paths()] if folder is not None else []
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
    urls = [f"{mirror}/{path}" for path in remote.mirror_paths()] if mirror else [remote.url]
    return _into_cache(remote, urls, expected)


def _offline() -> bool:
    switches = (os.environ.get(name, "").strip().lower() for name in ("KERAS_VIT_OFFLINE", "HF_HUB_OFFLINE"))
    return any(switch not in ("", "0", "false", "no", "off") for switch in switches)


def _offline_message(remote: Remote) -> str:
    damaged = "is damaged in the cache, or cannot be checked (add #sha256=<hex> to its URL)"
    state = damaged if remote.cached.exists() else "is not in the cache"
    return (
        f"{remote.cached.name} {state}, and KERAS_VIT_OFFLINE or HF_HUB_OFFLINE forbids the network."
        f" Download {remote.url} elsewhere and save it as {remote.cached}."
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
        kind = type(error).__name__
        absent = _offline() or kind in ("EntryNotFoundError", "RemoteEntryNotFoundError")
        message = no_connection("huggingface.co") if kind == "LocalEntryNotFoundError" else f"{remote.url}: {error}"
        message = _offline_message(remote) if _offline() else message
        raise (FileUnavailableError if absent else DownloadError)(message) from error


def _into_cache(remote: Remote, urls: list[str], expected: Expected) -> Path:
    """Download a file into the cache, unless another process has just done so."""
    from filelock import FileLock

    cached, part = remote.cached, remote.cached.with_name(remote.cached.name + ".part")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(cached.with_name(cached.name + ".lock")):
            if not is_intact(cached, expected):
                sha256 = _from_first(urls, part, expected, cached.name)
                write_pin(cached, part, sha256)
                part.replace(cached)
    except DownloadError:
        raise
    except OSError as error:
        raise DownloadError(
            f"{remote.url} cannot be saved as {cached}: {error}. Free some space, or set KERAS_VIT_CACHE to a"
            " writable folder."
        ) from error
    return cached


def _from_first(urls: list[str], part: Path, expected: Expected, name: str) -> str:
    """Download from the first URL that has the file, and return its SHA-256."""
    refusals = []
    for url in urls:
        try:
            return download(url, part, expected, name)
        except FileUnavailableError as error:
            refusals.append(str(error))
    raise FileUnavailableError(f"{name} is not available. " + " ".join(refusals))
