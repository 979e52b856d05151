"""PyTorch's files are read without running code in them; without PyTorch they are refused."""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import converters
from keras_vit.converters.containers import CheckpointError, open_container
from model_weights import assert_same_bits, values
from tiny_models import built

ERF: dict[str, Any] = {"activation": "gelu_erf"}
FACTS = {"num_heads": 4, "position_prefix": True}


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


class Trap:
    """Run code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(__file__).with_suffix(".sprung"),)


@pytest.mark.torch
@pytest.mark.parametrize(("outside", "inside"), [(None, ""), ("model", "module."), ("state_dict", "")])
def test_weights_are_found_where_training_programs_keep_them(
    tmp_path: Path, torch: Any, outside: str | None, inside: str
) -> None:
    path = converters.save(built(**ERF), tmp_path / "timm" / "model", format="timm")
    with open_container(path) as file:
        state = {inside + name: torch.from_numpy(file.read(name)) for name in file.headers}
    whole = {outside: state, "epoch": 3, "args": argparse.Namespace(lr=0.1)} if outside else state
    torch.save(whole, tmp_path / "model.pth")
    assert converters.detect(tmp_path / "model.pth") == "timm"
    assert_same_bits(values(converters.load(tmp_path / "model.pth", config=FACTS)), values(built(**ERF)))


@pytest.mark.torch
def test_a_folder_of_hugging_face_may_hold_a_pytorch_file(tmp_path: Path, torch: Any) -> None:
    model = built(**ERF, norm_epsilon=1e-12)
    path = converters.save(model, tmp_path / "model", format="huggingface")
    with open_container(path) as file:
        state = {name: torch.from_numpy(file.read(name)) for name in file.headers}
    torch.save(state, path.with_name("pytorch_model.bin"))
    path.unlink()
    assert_same_bits(values(converters.load(path.parent)), values(model))


@pytest.mark.torch
def test_types_shapes_and_strides_come_through(tmp_path: Path, torch: Any) -> None:
    wide = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    saved = {
        "plain": wide,
        "transposed": wide.T,
        "part": wide[1:3, ::2],
        "half": wide.half(),
        "bfloat16": wide.bfloat16(),
        "whole": wide.long(),
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(wide),
    }
    torch.save(saved, tmp_path / "all.pth")
    with open_container(tmp_path / "all.pth") as file:
        assert {name: header.shape for name, header in file.headers.items()} == {
            name: tuple(value.shape) for name, value in saved.items()
        }
        read = {name: file.read(name) for name in file.headers}
    for name, value in saved.items():  # after it is closed
        want = value.detach().float() if name == "bfloat16" else value.detach()
        assert np.array_equal(read[name], want.numpy())
        assert read[name].flags.writeable
    assert file.headers["bfloat16"].dtype == "bfloat16"


@pytest.mark.torch
def test_a_file_that_would_run_code_is_refused_and_not_run(tmp_path: Path, torch: Any) -> None:
    for content in (Trap(), {"model": {"w": torch.ones(2)}, "trap": Trap()}):
        torch.save(content, tmp_path / "trap.pth")
        with pytest.raises(CheckpointError, match="holds more than weights and is not run"):
            open_container(tmp_path / "trap.pth")
    assert not Path(__file__).with_suffix(".sprung").exists()


@pytest.mark.torch
def test_a_file_that_is_cut_compressed_old_or_without_tensors_is_refused(tmp_path: Path, torch: Any) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "whole.pth")
    for size in (0, 10, 100, 1000, -100, -1):
        (tmp_path / "cut.pth").write_bytes((tmp_path / "whole.pth").read_bytes()[:size])
        with pytest.raises(CheckpointError):
            open_container(tmp_path / "cut.pth")
    for value in (3, [1.0], {}, {"model": {}}, {1: 2}):
        torch.save(value, tmp_path / "none.pth")
        with pytest.raises(CheckpointError, match="without tensors"):
            open_container(tmp_path / "none.pth")
    with zipfile.ZipFile(tmp_path / "whole.pth") as whole, zipfile.ZipFile(tmp_path / "bomb.pth", "w") as bomb:
        for info in whole.infolist():
            bomb.writestr(info.filename, whole.read(info), zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="with a compressed member"):
        open_container(tmp_path / "bomb.pth")
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="PyTorch before 1.6, a pickle"):
        open_container(tmp_path / "old.pth")


@pytest.mark.torch
def test_tensors_that_share_data_describe_at_most_twice_the_file(tmp_path: Path, torch: Any) -> None:
    tied = torch.ones(10_000)
    torch.save({"a": tied, "b": tied}, tmp_path / "tied.pth")
    with open_container(tmp_path / "tied.pth") as file:
        assert file.read("b").sum() == 10_000
    for bomb in ({f"{i}": tied for i in range(900)}, {"w": torch.ones(1).expand(10**12)}):
        torch.save(bomb, tmp_path / "bomb.pth")
        with pytest.raises(CheckpointError, match="share their data and describe"):
            open_container(tmp_path / "bomb.pth")


def test_without_pytorch_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with zipfile.ZipFile(tmp_path / "model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
    message = r'is a PyTorch file.*\.safetensors.*pip install "keras-vit-zoo\[torch\]"'
    with pytest.raises(CheckpointError, match=message):
        open_container(tmp_path / "model.bin")
