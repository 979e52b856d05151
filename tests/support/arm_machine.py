"""An emulated ARM64 processor with Python, NumPy and LiteRT, in a folder: nothing is installed, and root is not needed.

Debian's packages of qemu, and of Python for arm64, are downloaded and unpacked; the wheels are those for aarch64.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

LITERT = "2.1.6"  # 2.2.0 and 2.3.0 crash in qemu 7.2 when an Interpreter is made
# Without int8 matrix products (i8mm): qemu computes them wrong, as int8 files of TensorFlow's converter show too.
CPU = "cortex-a76"
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")


class UnavailableError(Exception):
    """The machine cannot be set up here."""


def set_up(folder: Path) -> None:
    """Download everything into a folder, once.

    Raises:
        UnavailableError: there is no apt-get, or it or pip cannot get the packages.
    """
    if (folder / "complete").exists():
        return
    if missing := [tool for tool in ("apt-get", "dpkg", "dpkg-deb") if not shutil.which(tool)]:
        raise UnavailableError(f"the emulator comes from Debian's packages; {', '.join(missing)} not found")
    shutil.rmtree(folder, ignore_errors=True)
    _unpack(folder / "qemu", _output("dpkg", "--print-architecture"), "qemu-user-static")
    _unpack(folder / "debian", "arm64", "python3", "libstdc++6", "libgomp1")
    python_version = _python(folder).name.removeprefix("python")
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--only-binary=:all:"]
    site = ["--target", folder / "site", "--python-version", python_version, *platforms]
    _output(*pip, *site, "numpy", f"ai-edge-litert=={LITERT}")
    (folder / "complete").touch()


def run(folder: Path, script: Path, *arguments: Path) -> None:
    """Run a Python script on the emulated processor."""
    qemu = [folder / "qemu" / "usr" / "bin" / "qemu-aarch64-static", "-cpu", CPU, "-L", folder / "debian"]
    variables = ["-E", "PYTHONHOME=", "-E", f"PYTHONPATH={folder / 'site'}", "-E", "PYTHONDONTWRITEBYTECODE=1"]
    ended = subprocess.run([*qemu, *variables, _python(folder), script, *arguments], capture_output=True, text=True)
    assert not ended.returncode, f"{ended.returncode}: {ended.stderr[-2000:]}"


def _python(folder: Path) -> Path:
    """Return the path of Python with its version, such as python3.11."""
    return (folder / "debian" / "usr" / "bin" / "python3").resolve()


def _unpack(folder: Path, architecture: str, *packages: str) -> None:
    """Unpack Debian packages and all that they need into a folder, with lists of packages of its own."""
    apt = folder / "apt"
    for name in ("state/lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True)
    (apt / "installed").touch()
    settings = {
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "installed",
        "Dir::Cache": apt / "cache",
        "APT::Architecture": architecture,
        "APT::Architectures::": architecture,
        "APT::Sandbox::User": "",
    }
    command = ["apt-get", "-q", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    _output(*command, "update")
    _output(*command, "-y", "--no-install-recommends", "--download-only", "install", *packages)
    for package in (apt / "cache" / "archives").glob("*.deb"):
        _output("dpkg-deb", "--extract", package, folder)
    shutil.rmtree(apt)


def _output(*command: str | Path) -> str:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise UnavailableError(f"{' '.join(map(str, command))}: {ended.stderr[-1000:]}")
    return ended.stdout.strip()
