"""Transfers: whatever the server does, the result is the complete and correct file, or an error."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hostile_server import GOOD, HostileServer, Served, npz, safetensors_file, sha256
from keras_vit._util import transfer
from keras_vit._util.download import fetch
from keras_vit.errors import DownloadError

pytest_plugins = ["download_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

ETAG = {"ETag": '"v1"'}


def kept(folder: Path) -> list[Path]:
    """Return the files under their final names: all except pins, locks and partial downloads."""
    side = (".sha256", ".lock", ".part", ".etag")
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix not in side]


@pytest.mark.parametrize(
    ("served", "ranges"),
    [
        (Served(GOOD), [None]),
        (Served(GOOD, ["503", "503"]), [None] * 3),
        (Served(GOOD, ["429"]), [None] * 2),
        (
            Served(GOOD, ["cut"]),
            [None] * 2,
        ),  # the rest may be of another version, so the download starts again
        (Served(GOOD, ["cut"], headers={"ETag": 'W/"v1"'}), [None] * 2),
        (Served(GOOD, ["cut"], headers=ETAG), [None, "bytes=R-"]),
        (Served(GOOD, ["cut"] * 4, headers=ETAG), [None] + ["bytes=R-"] * 4),
        (Served(GOOD, ["cut"], headers=ETAG, ranges=False), [None, "bytes=R-"]),
        (Served(GOOD, ["cut", "wrong"], headers=ETAG), [None, "bytes=R-", None]),
        (Served(GOOD, ["cut", "shifted"], headers=ETAG), [None, "bytes=R-", None]),
        (Served(GOOD, ["stall"]), [None] * 2),
        (Served(GOOD, ["wrong"]), [None] * 2),
        (Served(GOOD, ["cut"], no_length=True), [None] * 2),
    ],
    ids=lambda value: f"{value.faults}-{value.headers}" if isinstance(value, Served) else "",
)
@pytest.mark.parametrize("known", [True, False], ids=["sha256", "no hash"])
def test_passing_failures_are_overcome(
    server: HostileServer,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    served: Served,
    ranges: list[str | None],
    known: bool,
) -> None:
    if "stall" in served.faults:
        monkeypatch.setattr(transfer, "STALL", 1.0)
    server.files["/dir/x.npz"] = Served(**{**vars(served), "faults": list(served.faults)})
    path = fetch(f"{server.url}/dir/x.npz", sha256=sha256(GOOD) if known else None)
    assert path.read_bytes() == GOOD
    assert path.name == "x.npz"
    assert [asked and re.sub(r"\d+", "R", asked) for _, asked in server.requests] == ranges
    assert sorted(it.suffix for it in cache.rglob("x.npz*")) in (
        [".lock", ".npz", ".sha256"],
        [".npz", ".sha256"],
    )
    server.requests.clear()
    assert fetch(f"{server.url}/dir/x.npz") == path
    assert server.requests == []


def test_a_transfer_resumes_only_the_same_version(server: HostileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "ATTEMPTS", 1)
    url = f"{server.url}/x.bin"
    server.files["/x.bin"] = Served(b"old" * 1000, ["cut"], headers=ETAG)
    with pytest.raises(DownloadError, match="1 attempts.*1500"):
        fetch(url)
    server.files["/x.bin"] = Served(b"new" * 1000, headers={"ETag": '"v2"'})
    assert fetch(url).read_bytes() == b"new" * 1000
    assert [asked for _, asked in server.requests] == [None, "bytes=1500-"]


def test_a_known_size_replaces_the_stated_one(server: HostileServer) -> None:
    server.files["/x.bin"] = Served(GOOD, ["cut"], headers=ETAG, no_length=True)
    assert fetch(f"{server.url}/x.bin", size=len(GOOD)).read_bytes() == GOOD
    assert server.requests[1][1] == f"bytes={len(GOOD) // 2}-"


def test_a_range_beyond_the_end_starts_again(server: HostileServer, cache: Path) -> None:
    server.files |= {"/x.bin": Served(GOOD, ["cut"] * 5, headers=ETAG)}
    with pytest.raises(DownloadError):
        fetch(f"{server.url}/x.bin")
    server.files["/x.bin"] = Served(b"shorter", headers=ETAG)  # a server error: another file with the same ETag
    assert fetch(f"{server.url}/x.bin").read_bytes() == b"shorter"


def test_a_download_that_was_killed_is_resumed(server: HostileServer, cache: Path) -> None:
    url, body = f"{server.url}/x.npz", npz(count=200_000)
    assert len(body) > 6 * transfer.CHUNK  # so that some of its first half is on disk when the process dies
    server.files["/x.npz"] = Served(body, ["stall"], headers=ETAG)
    child = subprocess.Popen([sys.executable, "-c", f"from keras_vit._util.download import fetch; fetch({url!r})"])
    deadline = time.monotonic() + 20
    while not any(part.stat().st_size for part in cache.rglob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert kept(cache) == []
    assert fetch(url).read_bytes() == body
    assert re.fullmatch(r"bytes=[1-9]\d*-", server.requests[1][1] or "")


def test_four_processes_at_once_download_once(server: HostileServer) -> None:
    server.files["/x.npz"] = Served(GOOD, ["503"])
    code = f"from keras_vit._util.download import fetch; print(fetch({server.url + '/x.npz'!r}).stat().st_size)"
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [child.communicate(timeout=30)[0] for child in children] == [f"{len(GOOD)}\n"] * 4
    assert len(server.requests) == 2  # one process: 503, then the file


# ------------------------------------------------------------------ what must never be returned

BAD_PAGE = b"<html>please log in</html>"
OTHER = "a" * 64


@pytest.mark.parametrize(
    ("file", "served", "known", "message"),
    [
        ("x.npz", Served(GOOD, always="404"), {}, "404"),
        ("x.npz", Served(GOOD, always="403"), {}, "403"),
        ("x.npz", Served(GOOD, always="400"), {}, "400"),
        ("x.npz", Served(GOOD, always="503"), {}, "5 attempts.*503"),
        ("x.npz", Served(GOOD, always="cut"), {}, "5 attempts.*(ended after|IncompleteRead)"),
        ("x.npz", Served(GOOD, always="cut", headers=ETAG), {}, "5 attempts"),
        ("x.npz", Served(GOOD, always="cut", no_length=True), {}, "twice with wrong content.*not an intact zip"),
        ("x.npz", Served(GOOD, always="wrong"), {}, "twice with wrong content"),
        ("x.npz", Served(GOOD, always="wrong"), {"sha256": sha256(GOOD)}, "sha256 is"),
        ("x.npz", Served(GOOD), {"sha256": OTHER}, f"expected {OTHER}"),
        ("x.npz", Served(GOOD), {"size": 7}, f"states {len(GOOD):,} bytes, expected 7"),
        ("x.bin", Served(GOOD, no_length=True), {"size": 7}, f"has {len(GOOD):,} bytes, expected 7"),
        ("x.npz", Served(GOOD, stated_length=len(GOOD) + 9), {}, "5 attempts"),
        ("x.npz", Served(GOOD, stated_length=len(GOOD) + 9), {"sha256": sha256(GOOD)}, "5 attempts"),
        ("x.npz", Served(GOOD, stated_length=len(GOOD) - 9), {}, "not an intact zip"),
        ("x.npz", Served(BAD_PAGE), {}, "not an intact zip"),
        ("x.safetensors", Served(BAD_PAGE), {}, "header"),
        ("x.safetensors", Served(safetensors_file()[:-1], no_length=True), {}, "its own header states"),
        ("x.bin", Served(GOOD, no_length=True), {}, "neither a length nor a checksum.*#sha256=<hex>"),
        ("x.bin", Served(GOOD, always="cut", headers={"x-goog-hash": "md5=AAAA"}), {}, "5 attempts"),
    ],
)
def test_nothing_bad_is_returned(
    server: HostileServer, cache: Path, file: str, served: Served, known: dict[str, str | int], message: str
) -> None:
    server.files[f"/{file}"] = served
    with pytest.raises(DownloadError, match=message) as caught:
        fetch(f"{server.url}/{file}", **known)  # type: ignore[arg-type]
    assert "KERAS_VIT_CACHE" not in str(caught.value)  # the advice for full disks
    assert kept(cache) == []
    if served.always in ("404", "403", "400"):
        assert len(server.requests) == 1


def test_a_server_that_stalls_for_ever_is_given_up(
    server: HostileServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STALL", 0.1)
    server.files["/x.npz"] = Served(GOOD, always="stall")
    with pytest.raises(DownloadError, match="5 attempts.*timed out"):
        fetch(f"{server.url}/x.npz")
    assert kept(cache) == []


def test_a_server_that_is_not_there_is_given_up(server: HostileServer) -> None:
    server.server_close()
    with pytest.raises(DownloadError, match="5 attempts.*Connection"):
        fetch(f"{server.url}/x.npz")


# crc32c's published check value for these digits is e3069283; the other is the output of md5sum.
DIGITS = b"123456789"
MD5, CRC32C = "JfnnlDI7RTiF9RgfG2JNCw==", "4waSgw=="
NO_MD5, NO_CRC32C = "A" + MD5[1:], "5" + CRC32C[1:]


@pytest.mark.parametrize(
    ("stated", "wrong"),
    [
        (f"md5={MD5}", None),
        (f"crc32c={CRC32C}", None),
        (f"crc32c={CRC32C},md5={MD5}", None),
        (f"md5={NO_MD5}", "md5"),
        (f"crc32c={NO_CRC32C}", "crc32c"),
        (f"crc32c={CRC32C},md5={NO_MD5}", "md5"),
        (f"crc32c={NO_CRC32C}, md5={MD5}", "crc32c"),
    ],
)
def test_what_the_storage_states_is_verified(
    server: HostileServer, cache: Path, stated: str, wrong: str | None
) -> None:
    server.files["/x.bin"] = Served(DIGITS, headers={"x-goog-hash": stated}, no_length=True)
    if wrong:
        with pytest.raises(DownloadError, match=f"its {wrong} is"):
            fetch(f"{server.url}/x.bin")
        assert kept(cache) == []
    else:
        assert fetch(f"{server.url}/x.bin").read_bytes() == DIGITS


def test_a_known_sha256_outranks_what_the_storage_states(server: HostileServer) -> None:
    server.files["/x.npz"] = Served(DIGITS, headers={"x-goog-hash": f"md5={NO_MD5}"})
    assert fetch(f"{server.url}/x.npz#sha256={sha256(DIGITS).upper()}").read_bytes() == DIGITS
