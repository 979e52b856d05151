"""Downloads return the complete and right file or one clear error; the cache, mirrors and the offline switch."""

from __future__ import annotations

import base64
import hashlib
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from file_server import FileServer, Served
from keras_vit import zoo
from keras_vit._util import downloads
from keras_vit._util.downloads import fetch
from keras_vit._util.files import cache_folder
from keras_vit.errors import DownloadError, FileUnavailableError
from keras_vit.zoo import cards

pytest_plugins = ["download_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

GOOD = random.Random(0).randbytes(100_000)  # the same in every test process: names of tests have its hash
OTHER = "a" * 64
OBJECT = "gs://vit_models/augreg/X.npz"
LAYOUTS = ["vit_models/augreg/X.npz", "augreg/X.npz", "X.npz"]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def md5_header(data: bytes) -> dict[str, str]:
    """Return the header that Google's storage sends."""
    return {"x-goog-hash": f"crc32c=AAAAAA==,md5={base64.b64encode(hashlib.md5(data).digest()).decode()}"}


def kept(folder: Path) -> list[str]:
    """Return the files under their final names: all except pins, locks and partial downloads."""
    side = (".sha256", ".lock", ".part")
    return [path.name for path in folder.rglob("*") if path.is_file() and path.suffix not in side]


# ---- transfers


@pytest.mark.parametrize(
    ("faults", "known", "ranges"),
    [
        ([], "", [None]),
        (["503", "429"], "", [None] * 3),
        (["cut"], "md5", [None, "bytes=R-"]),
        (["cut"] * 4, "sha256", [None] + ["bytes=R-"] * 4),
        (["cut"], "", [None, "bytes=R-", None]),  # what was joined could not be checked
        (["cut", "wrong"], "sha256", [None, "bytes=R-", None]),
        (["stall"], "sha256", [None, "bytes=R-"]),
    ],
)
def test_a_transfer_that_fails_is_continued(
    server: FileServer,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: list[str],
    known: str,
    ranges: list[str | None],
) -> None:
    monkeypatch.setattr(downloads, "TIMEOUT", 1.0)
    server.files["/dir/x.npz"] = Served(GOOD, list(faults), md5_header(GOOD) if known == "md5" else {})
    hashed = {"sha256": sha256(GOOD)} if known == "sha256" else {}
    path = fetch(f"{server.url}/dir/x.npz", **hashed)
    assert path.read_bytes() == GOOD
    assert [asked and re.sub(r"\d+", "R", asked) for _, asked in server.requests] == ranges
    assert kept(cache) == ["x.npz"]
    assert not [*cache.rglob("*.part")]
    assert fetch(f"{server.url}/dir/x.npz") == path
    assert len(server.requests) == len(ranges)  # from the cache


@pytest.mark.parametrize(
    ("served", "known", "message"),
    [
        (Served(GOOD, ["404"]), None, "404 .*no such file there"),
        (Served(GOOD, ["403"]), None, "403 .*no access to it"),
        (Served(GOOD, ["400"]), None, "400 .*instead of a file"),
        (Served(GOOD, ["503"] * 5), None, "5 attempts.*503"),
        (Served(GOOD, ["cut"] * 9), None, "5 attempts"),
        (Served(GOOD, ["wrong"]), sha256(GOOD), "its SHA-256 is .* expected"),
        (Served(GOOD), OTHER, f"expected {OTHER}"),
        (Served(GOOD, headers=md5_header(b"")), None, "its MD5 is"),
        (Served(b"\n<!DOCTYPE html><p>please log in"), None, "is a web page"),
        (Served(GOOD, has_length=False), None, "neither a length nor a checksum.*#sha256=<hex>"),
    ],
    ids=lambda value: "" if isinstance(value, Served) else None,
)
def test_nothing_bad_is_returned(
    server: FileServer, cache: Path, served: Served, known: str | None, message: str
) -> None:
    server.files["/x.npz"] = served
    with pytest.raises(DownloadError, match=message) as caught:
        fetch(f"{server.url}/x.npz", sha256=known)
    assert "KERAS_VIT_CACHE" not in str(caught.value)  # the advice for full disks
    assert kept(cache) == []
    assert len(server.requests) == (1 if not message.startswith("5 attempts") else 5 if "503" in message else 9)
    if not served.has_length:  # a hash replaces the length
        assert fetch(f"{server.url}/x.npz#sha256={sha256(GOOD).upper()}").read_bytes() == GOOD


def test_a_transfer_never_joins_two_versions(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "ATTEMPTS", 1)
    url, old, new = f"{server.url}/x.dat", b"old" * 1000, b"new" * 1000
    server.files["/x.dat"] = Served(old, ["cut"], md5_header(old))
    with pytest.raises(DownloadError, match="1 attempts"):
        fetch(url)
    monkeypatch.setattr(downloads, "ATTEMPTS", 2)
    server.files["/x.dat"] = Served(new, headers=md5_header(new))
    assert fetch(url).read_bytes() == new


def test_a_download_that_was_killed_is_continued(server: FileServer, cache: Path) -> None:
    body = os.urandom(1 << 21)
    url = f"{server.url}/x.npz#sha256={sha256(body)}"
    server.files["/x.npz"] = Served(body, ["stall"])
    child = subprocess.Popen([sys.executable, "-c", f"from keras_vit._util.downloads import fetch; fetch({url!r})"])
    deadline = time.monotonic() + 20
    while not any(part.stat().st_size for part in cache.rglob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert kept(cache) == []
    assert fetch(url).read_bytes() == body
    assert re.fullmatch(r"bytes=[1-9]\d*-", server.requests[1][1] or "")


def test_four_callers_at_once_download_once(server: FileServer) -> None:
    server.files["/x.npz"] = Served(GOOD)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(fetch, [f"{server.url}/x.npz"] * 4))
    assert [path.read_bytes() for path in paths] == [GOOD] * 4
    assert len(server.requests) == 1


def test_without_a_connection_there_is_one_attempt_and_one_short_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(downloads, "BACKOFF", 1000.0)  # a second attempt would wait
    with pytest.raises(DownloadError) as caught:
        fetch("gs://vit_models/sam/ViT-B_16.npz")
    words = ("storage.googleapis.com", "'digits'", "path", "KERAS_VIT_MIRROR", "KERAS_VIT_OFFLINE", "ViT-B_16.npz as /")
    assert all(word in str(caught.value) for word in words)


def test_a_full_disk_leaves_nothing_behind(server: FileServer, cache: Path) -> None:
    server.files["/x.npz"] = Served(GOOD)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(GOOD) // 2, limits[1]))
    try:
        with pytest.raises(DownloadError, match="Free some space, or set KERAS_VIT_CACHE"):
            fetch(f"{server.url}/x.npz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.suffix for path in cache.rglob("*") if path.is_file()} <= {".lock"}
    assert fetch(f"{server.url}/x.npz").read_bytes() == GOOD


# ---- the cache


def test_a_damaged_cache_entry_is_downloaded_again(server: FileServer) -> None:
    server.files["/x.npz"] = Served(GOOD)
    path = fetch(f"{server.url}/x.npz")
    os.truncate(path, 100)
    assert fetch(f"{server.url}/x.npz").read_bytes() == GOOD
    path.write_bytes(bytes(path.stat().st_size))
    path.with_name("x.npz.sha256").write_text("no pin\n")
    assert fetch(f"{server.url}/x.npz").read_bytes() == GOOD
    path.unlink()
    assert fetch(f"{server.url}/x.npz").read_bytes() == GOOD
    assert len(server.requests) == 4


def test_a_pinned_file_is_not_read_again_unless_another_version_is_wanted(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/x.npz"] = Served(GOOD)
    path = fetch(f"{server.url}/x.npz")
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)
        assert fetch(f"{server.url}/x.npz", sha256=sha256(GOOD)) == path
    assert len(server.requests) == 1
    server.files["/x.npz"] = Served(b"new")
    assert fetch(f"{server.url}/x.npz", sha256=sha256(b"new")).read_bytes() == b"new"


def test_equal_names_from_different_places_stay_apart(server: FileServer) -> None:
    paths = ["/a/x.npz", "/b/x.npz", "/b%2Fx.npz", "/b/x.npz?v=1", "/b/x.npz?v=2"]
    server.files = {path: Served(path.encode()) for path in paths}
    fetched = [fetch(server.url + path) for path in paths]
    assert [path.read_bytes().decode() for path in fetched] == paths
    assert fetched[0].parts[-4:] == ("http", f"127.0.0.1+{server.server_address[1]}", "a", "x.npz")


def test_paths_that_lead_elsewhere_are_refused(cache: Path) -> None:
    for url in (
        "https://host/../../evil.npz",
        "https://host/%2e%2e/%2E%2E/evil.npz",
        "https://host//etc/passwd",
        "https://host",
        "https:///x.npz",
        "gs://bucket/../../../evil.npz",
        "hf://org/../../x.npz",
        "hf://org/repo",
        "s3://bucket/x.npz",
    ):
        with pytest.raises(ValueError, match=re.escape(url.removeprefix("gs://bucket/"))):
            fetch(url)
    assert not cache.exists()


@given(
    st.sampled_from(["https://host/", "gs://bucket/", "hf://org/repo/", "https://"]),
    st.text(alphabet="./\\%2eEfF5Cc@:?#a\0~", max_size=20),
)
def test_no_url_leads_out_of_the_cache(start: str, rest: str) -> None:
    try:
        place = downloads._locate(start + rest).cached
    except ValueError:
        return
    assert Path(os.path.normpath(place)).is_relative_to(cache_folder())
    assert "\0" not in str(place)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment, folder in (
        ({"HOME": "/home/me"}, "/home/me/.keras/keras_vit"),
        ({"KERAS_HOME": "/k"}, "/k/keras_vit"),
        ({"HOME": "/home/me", "KERAS_VIT_CACHE": "~/x"}, "/home/me/x"),
    ):
        with monkeypatch.context() as patch:
            for name in ("KERAS_VIT_CACHE", "KERAS_HOME"):
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            assert cache_folder() == Path(folder)


# ---- the hub, local files, offline, mirrors


@pytest.fixture
def hub(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    """Let huggingface_hub take the server for the hub, with its cache in a new folder."""
    from huggingface_hub import constants

    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return server


def test_a_file_of_the_hub_is_downloaded_once(hub: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = {"X-Repo-Commit": "c" * 40, "ETag": f'"{sha256(GOOD)}"'}
    hub.files["/org/repo/resolve/v1/dir/x.npz"] = Served(GOOD, headers=stated)
    path = fetch("hf://org/repo/dir/x.npz@v1", sha256=sha256(GOOD))
    assert path.read_bytes() == GOOD
    with pytest.raises(DownloadError, match="its SHA-256 is"):
        fetch("hf://org/repo/dir/x.npz@v1", sha256=OTHER)
    assert [file for file, _ in hub.requests if file.endswith("x.npz")] == ["/org/repo/resolve/v1/dir/x.npz"]
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    assert fetch("hf://org/repo/dir/x.npz@v1") == path
    with pytest.raises(FileUnavailableError, match="forbids the network"):
        fetch("hf://org/repo/x.npz")


def test_without_a_connection_there_is_one_attempt_and_a_copy_is_used(
    hub: FileServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    hub.files["/org/repo/resolve/main/x.npz"] = Served(GOOD, headers={"X-Repo-Commit": "c" * 40, "ETag": '"e"'})
    copy = fetch("hf://org/repo/x.npz")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, and nobody listens
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", closed + "/{repo_id}/{revision}/{filename}")
        monkeypatch.setattr(constants, "ENDPOINT", closed)
        with pytest.raises(DownloadError, match="There is no connection to 127.0.0.1"):
            fetch("hf://org/repo/other.npz")
        assert fetch("hf://org/repo/x.npz") == copy
    assert not [record for record in caplog.records if "Retry" in record.getMessage()]


def test_the_hub_says_why_a_file_is_not_available(hub: FileServer) -> None:
    for code, status, message in (
        ("GatedRepo", "403", "accept its terms at https://huggingface.co/org/repo and log in with `hf auth login`"),
        ("RepoNotFound", "404", "hf auth login"),
        ("EntryNotFound", "404", "Entry Not Found"),
    ):
        hub.files["/org/repo/resolve/main/x.npz"] = Served(b"", [status], {"X-Error-Code": code})
        with pytest.raises(FileUnavailableError, match=f"(?s)hf://org/repo/x.npz: .*{message}"):
            fetch("hf://org/repo/x.npz")


def test_local_files_are_returned_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x#y z.bin"
    path.write_bytes(b"123456789")
    for source in (str(path), path.as_uri(), f"{path.as_uri()}#sha256={sha256(b'123456789')}"):
        assert fetch(source) == path
    for wrong in (f"{path.as_uri()}#sha256=12", f"{path.as_uri()}#sha265={OTHER}"):
        with pytest.raises(ValueError, match="64 hexadecimal digits"):
            fetch(wrong)
    with pytest.raises(ValueError, match="contradict"):
        fetch(f"{path.as_uri()}#sha256={OTHER}", sha256="b" * 64)
    assert fetch(str(tmp_path)) == tmp_path
    with pytest.raises(DownloadError, match=f"expected {OTHER}"):
        fetch(str(path), sha256=OTHER)
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "absent"))):
        fetch(str(tmp_path / "absent"))


@pytest.mark.parametrize("switch", ["KERAS_VIT_OFFLINE", "HF_HUB_OFFLINE"])
def test_anything_but_a_no_is_offline(server: FileServer, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    values = {"": False, " 0": False, "No": False, "OFF ": False, " 1": True, "TRUE": True}
    for number, (value, offline) in enumerate(values.items()):
        server.files[f"/{number}.dat"] = Served(GOOD)
        monkeypatch.setenv(switch, value)
        if offline:
            with pytest.raises(DownloadError, match="network"):
                fetch(f"{server.url}/{number}.dat")
        else:
            assert fetch(f"{server.url}/{number}.dat").read_bytes() == GOOD


def test_offline_the_cache_answers_or_the_error_says_what_to_put_where(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    with pytest.raises(DownloadError) as caught:
        fetch(OBJECT)
    place = cache / "https/storage.googleapis.com/vit_models/augreg/X.npz"
    assert "https://storage.googleapis.com/vit_models/augreg/X.npz" in str(caught.value)
    assert str(place) in str(caught.value)
    place.parent.mkdir(parents=True)
    place.write_bytes(GOOD)
    assert fetch(OBJECT) == place
    os.truncate(place, 50)
    with pytest.raises(DownloadError, match="damaged"):
        fetch(OBJECT)


def test_offline_all_files_of_a_model_are_named_by_addresses_that_any_program_downloads(
    hub: FileServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    row = cards.select(cards.card("DINOv2-S/14"), "default")
    with pytest.raises(FileUnavailableError) as caught:
        zoo.load("DINOv2-S/14")
    repo, _, file = row.location.removeprefix("hf://").rpartition("/")
    places = [cache / "hf" / repo / name for name in (file, "config.json")]
    for place in places:
        assert f"https://huggingface.co/{repo}/resolve/main/{place.name} as {place}" in str(caught.value)
    places[1].parent.mkdir(parents=True)
    places[1].write_text("{}")
    with pytest.raises(FileUnavailableError) as caught:
        zoo.load("DINOv2-S/14")
    assert str(places[0]) in str(caught.value) and "config.json" not in str(caught.value)


def test_a_mirror_folder_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "nowhere"))
    with pytest.raises(FileUnavailableError, match=r"KERAS_VIT_MIRROR=.*nowhere is not a folder"):
        fetch(OBJECT)


def test_a_mirror_folder_answers_in_any_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (layout, offline) in enumerate(zip(LAYOUTS, "010", strict=True)):
        copy = tmp_path / str(number) / layout
        copy.parent.mkdir(parents=True)
        copy.write_bytes(GOOD)
        monkeypatch.setenv("KERAS_VIT_OFFLINE", offline)
        monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / str(number)))
        assert fetch(OBJECT, sha256=sha256(GOOD)) == copy
        assert fetch(OBJECT.replace("gs://", "https://storage.googleapis.com/")) == copy
        with pytest.raises(DownloadError, match="not the expected file"):
            fetch(OBJECT, sha256=OTHER)
    copy = tmp_path / "org" / "repo@main" / "dir" / "x.npz"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(GOOD)
    monkeypatch.setenv("KERAS_VIT_MIRROR", tmp_path.as_uri())
    assert fetch("hf://org/repo/dir/x.npz@main") == copy  # files of the hub by their revision
    with pytest.raises(DownloadError, match="Looked for"):
        fetch("hf://org/repo/dir/x.npz@v2")


def test_a_mirror_url_answers_or_the_error_says_what_was_tried(
    server: FileServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_VIT_MIRROR", f"{server.url}/m/")
    with pytest.raises(DownloadError, match="is not available") as caught:
        fetch(OBJECT)
    assert all(f"{server.url}/m/{layout}" in str(caught.value) for layout in LAYOUTS)
    server.requests.clear()
    server.files[f"/m/{LAYOUTS[1]}"] = Served(GOOD, ["503"])
    assert fetch(OBJECT) == cache / "https/storage.googleapis.com/vit_models/augreg/X.npz"
    assert [path for path, _ in server.requests] == [f"/m/{layout}" for layout in (*LAYOUTS[:2], LAYOUTS[1])]
