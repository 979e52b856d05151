"""Downloads use the right sources, cache and mirrors, and none when offline."""

import os
import re
import resource
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile_server import GOOD, HostileServer, Served, npz, sha256
from keras_vit._util.download import cache_folder, cached_files, fetch, integrity
from keras_vit.errors import DownloadError

pytest_plugins = ["download_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

OTHER = "a" * 64


def damage_truncate(path: Path) -> None:
    os.truncate(path, 100)


def damage_overwrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def damage_and_lose_the_pin(path: Path) -> None:
    os.truncate(path, 100)
    integrity.pin_of(path).unlink()


def damage_and_spoil_the_pin(path: Path) -> None:
    damage_overwrite(path)
    integrity.pin_of(path).write_text("no pin\n")


def lose(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "damage", [damage_truncate, damage_overwrite, damage_and_lose_the_pin, damage_and_spoil_the_pin, lose]
)
def test_a_damaged_cache_entry_is_downloaded_again(server: HostileServer, damage: Callable[[Path], None]) -> None:
    server.files["/x.npz"] = Served(GOOD)
    path = fetch(f"{server.url}/x.npz")
    damage(path)
    assert fetch(f"{server.url}/x.npz").read_bytes() == GOOD
    assert len(server.requests) == 2


def test_a_pinned_file_is_not_read_again(server: HostileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/x.npz"] = Served(GOOD)
    path = fetch(f"{server.url}/x.npz")
    monkeypatch.setattr(integrity, "digests", None)
    assert fetch(f"{server.url}/x.npz", sha256=sha256(GOOD), size=len(GOOD)) == path


def test_a_file_that_was_only_touched_is_hashed_once_and_kept(server: HostileServer) -> None:
    server.files["/x.dat"] = Served(GOOD)
    path = fetch(f"{server.url}/x.dat")
    os.utime(path, ns=(1, 1))
    assert fetch(f"{server.url}/x.dat") == path
    assert integrity.read_pin(path) == (sha256(GOOD), len(GOOD), 1)
    assert len(server.requests) == 1


def test_a_new_version_replaces_the_one_that_was_pinned(server: HostileServer) -> None:
    url = f"{server.url}/x.npz"
    server.files["/x.npz"] = Served(GOOD)
    fetch(url, sha256=sha256(GOOD))
    server.files["/x.npz"] = Served(npz(seed=1))
    assert fetch(url, sha256=sha256(npz(seed=1))).read_bytes() == npz(seed=1)


def test_equal_names_from_different_places_stay_apart(server: HostileServer) -> None:
    paths = ["/a/x.npz", "/b/x.npz", "/b%2Fx.npz", "/b/x.npz?v=1", "/b/x.npz?v=2"]
    server.files = {path: Served(npz(seed=seed, count=5)) for seed, path in enumerate(paths)}
    fetched = [fetch(server.url + path) for path in paths]
    assert [path.read_bytes() for path in fetched] == [npz(seed=seed, count=5) for seed in range(len(paths))]
    assert fetched[0].parts[-4:] == ("http", f"127.0.0.1+{server.server_address[1]}", "a", "x.npz")


@pytest.mark.parametrize(
    "url",
    [
        "https://host/../../evil.npz",
        "https://host/%2e%2e/%2E%2E/evil.npz",
        "https://host//etc/passwd",
        "https://../evil.npz",
        "https://host/",
        "https://host",
        "https:///x.npz",
        "gs://bucket/../../../evil.npz",
        "hf://org/../../x.npz",
        "hf://org/repo/../../../x.npz",
        "hf://org/repo",
        "ftp://host/x.npz",
        "s3://bucket/x.npz",
    ],
)
def test_paths_that_lead_elsewhere_are_refused(url: str, cache: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(url.removeprefix("gs://bucket/"))):
        fetch(url)
    assert not cache.exists()


@given(
    st.sampled_from(["https://host/", "gs://bucket/", "hf://org/repo/", "https://"]),
    st.text(alphabet="./\\%2eEfF5Cc@:?#a\0~", max_size=20),
)
def test_no_url_leads_out_of_the_cache(start: str, rest: str) -> None:
    root = cache_folder().resolve()
    try:
        place = cached_files._locate(start + rest).cached
    except ValueError:
        return
    assert Path(os.path.normpath(place)).is_relative_to(root)
    assert "\0" not in str(place)


def test_a_cache_that_cannot_be_written_is_named(
    server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "file" / "cache"))
    server.files["/x.npz"] = Served(GOOD)
    with pytest.raises(DownloadError, match="KERAS_VIT_CACHE"):
        fetch(f"{server.url}/x.npz")


def test_a_full_disk_leaves_nothing_behind(server: HostileServer, cache: Path) -> None:
    server.files["/x.npz"] = Served(GOOD)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(GOOD) // 2, limits[1]))
    try:
        with pytest.raises(DownloadError, match="Free some space"):
            fetch(f"{server.url}/x.npz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.suffix for path in cache.rglob("*") if path.is_file()} <= {".lock"}
    assert fetch(f"{server.url}/x.npz").read_bytes() == GOOD


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"KERAS_VIT_CACHE": "/a/b"}, "/a/b"),
        ({"KERAS_HOME": "/k"}, "/k/keras_vit"),
        ({"HOME": "/home/me"}, "/home/me/.keras/keras_vit"),
        ({"HOME": "/home/me", "KERAS_VIT_CACHE": "~/x"}, "/home/me/x"),
    ],
)
def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], folder: str) -> None:
    for name in ("KERAS_VIT_CACHE", "KERAS_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_progress_is_shown_on_a_terminal_only(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files |= {"/x.npz": Served(GOOD), "/y.npz": Served(GOOD)}
    fetch(f"{server.url}/x.npz")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fetch(f"{server.url}/y.npz")
    shown = capsys.readouterr().err
    assert "y.npz" in shown
    assert f"{len(GOOD) / 1000:.1f}/{len(GOOD) / 1000:.1f} kB" in shown


def test_the_progress_of_a_long_name_fits_a_terminal(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    name = f"B_16-{'i21k-300ep-' * 9}.npz"
    server.files[f"/{name}"] = Served(GOOD)
    fetch(f"{server.url}/{name}")
    shown = capsys.readouterr().err
    assert "B_16-i21k-300ep" in shown
    assert "kB" in shown


# ------------------------------------------------------------------ offline, and mirrors


def test_the_hub_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r'pip install "keras-vit-zoo\[hf\]"'):
        fetch("hf://org/repo/x.npz")


def test_the_hub_is_asked_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def hf_hub_download(repo: str, file: str, *, revision: str | None, local_files_only: bool) -> str:
        asked.append((repo, file, revision, local_files_only))
        if local_files_only:
            raise FileNotFoundError("not in the hub's cache")
        (tmp_path / "x.npz").write_bytes(GOOD)
        return str(tmp_path / "x.npz")

    hub = types.SimpleNamespace(hf_hub_download=hf_hub_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert fetch("hf://org/repo/dir/x.npz@refs/pr/1", sha256=sha256(GOOD)) == tmp_path / "x.npz"
    with pytest.raises(DownloadError, match="sha256"):
        fetch("hf://org/repo/x.npz", sha256=OTHER)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="forbids the network"):
        fetch("hf://org/repo/x.npz")
    assert asked == [
        ("org/repo", "dir/x.npz", "refs/pr/1", False),
        ("org/repo", "x.npz", None, False),
        ("org/repo", "x.npz", None, True),
    ]


def test_local_files_are_returned_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x#y z.bin"
    path.write_bytes(b"123456789")
    assert fetch(str(path)) == path
    assert fetch(path.as_uri()) == path
    assert fetch(f"{path.as_uri()}#sha256={sha256(b'123456789')}", size=9) == path
    assert fetch(str(tmp_path)) == tmp_path
    with pytest.raises(DownloadError, match=f"expected {OTHER}"):
        fetch(str(path), sha256=OTHER)
    with pytest.raises(DownloadError, match="9 bytes, expected 8"):
        fetch(str(path), size=8)
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "absent"))):
        fetch(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("source", "given"),
    [
        ("https://host/x.npz", "abc"),
        ("https://host/x.npz#sha256=12", None),
        (f"https://host/x.npz#sha265={OTHER}", None),
        (f"https://host/x.npz#sha256={OTHER}", "b" * 64),
    ],
)
def test_a_malformed_hash_is_refused(source: str, given: str | None) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits|contradict"):
        fetch(source, sha256=given)
