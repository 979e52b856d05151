"""The metadata that MediaPipe and Android's tools read, compared with their schema field by field."""

from __future__ import annotations

import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest

from keras_vit import VisionTransformer, export
from keras_vit.export.litert import metadata
from keras_vit.export.litert.builder import Builder
from keras_vit.model.config import Preprocessing
from litert_graph import interpreter, read_labels
from tiny_models import tiny

CLIP = Preprocessing(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
IMAGENET = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
LABELS = ["zero", "one", "tench, Tinca tinca"]


def made(**changes: Any) -> bytes:
    values: dict[str, Any] = {
        "dtype": "float32",
        "preprocessing": Preprocessing(),
        "num_channels": 3,
        "outputs": ["logits"],
        "has_labels": True,
    }
    return metadata.pack_metadata(**{**values, **changes})


class Table(flatbuffers.table.Table):
    """A table of a flatbuffer, whose fields are read by their numbers, without a schema."""

    @classmethod
    def root(cls, data: bytes) -> Table:
        return cls(data, struct.unpack_from("<I", data)[0])

    def offset(self, number: int) -> int:
        return self.Offset(4 + 2 * number)

    def byte(self, number: int) -> int:
        return (
            self.Get(flatbuffers.number_types.Uint8Flags, self.Pos + self.offset(number)) if self.offset(number) else 0
        )

    def table(self, number: int) -> Table:
        return Table(self.Bytes, self.Indirect(self.Pos + self.offset(number)))

    def text(self, number: int) -> str:
        return self.String(self.Pos + self.offset(number)).decode()

    def floats(self, number: int) -> list[float]:
        return self.GetVectorAsNumpy(flatbuffers.number_types.Float32Flags, self.offset(number)).tolist()

    def tables(self, number: int) -> list[Table]:
        start, count = self.Vector(self.offset(number)), self.VectorLen(self.offset(number))
        return [Table(self.Bytes, self.Indirect(start + 4 * index)) for index in range(count)]


def graph(data: bytes) -> tuple[Table, list[Table]]:
    """Return the tables of the input and of the outputs."""
    [main] = Table.root(data).tables(3)
    [image] = main.tables(2)
    return image, main.tables(3)


def test_the_mark_and_the_parser_stand_where_readers_look() -> None:
    data = made(name="vit")
    assert data[4:8] == b"M001" and data == made(name="vit")
    assert flatbuffers.util.BufferHasIdentifier(data, 0, b"M001")
    assert (Table.root(data).text(0), Table.root(data).text(7)) == ("vit", "1.0.0")


def test_callers_learn_to_prepare_the_image_and_its_range() -> None:
    torchvision = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]  # its numbers, times 255
    for dtype, preprocessing, mean, std, smallest, largest in (
        ("float32", Preprocessing(), [127.5], [127.5], [-1.0], [1.0]),
        ("float32", Preprocessing(mean=(0.0,), std=(1.0,)), [0.0], [255.0], [0.0], [1.0]),
        ("float32", IMAGENET, *torchvision, None, None),
        ("uint8", Preprocessing(), [0.0], [1.0], [0.0], [255.0]),
        ("uint8", IMAGENET, [0.0], [1.0], [0.0], [255.0]),
    ):
        image, _ = graph(made(dtype=dtype, preprocessing=preprocessing))
        [unit] = image.tables(4)
        assert unit.byte(0) == 1  # NormalizationOptions
        assert unit.table(1).floats(0) == pytest.approx(mean, rel=1e-6)  # float32
        assert unit.table(1).floats(1) == pytest.approx(std, rel=1e-6)
        if largest is not None:
            assert (image.table(5).floats(0), image.table(5).floats(1)) == (largest, smallest)


def test_metadata_that_mediapipe_refuses_are_announced_where_the_export_is_called(tmp_path: Path) -> None:
    # MediaPipe 1.2.2 refuses such a file with "Per-channel image normalization is not available."
    grey = {"mean": (0.4,) * 3, "std": (0.3,) * 3}
    for values in ({"mean": CLIP.mean}, {"std": CLIP.std}):
        preprocessing = Preprocessing(**{**grey, **values})
        with pytest.warns(UserWarning, match='^keras_vit: MediaPipe refuses .* input_dtype="uint8"'):
            made(preprocessing=preprocessing)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            made(preprocessing=preprocessing, dtype="uint8")
            made(preprocessing=Preprocessing(**grey))
    model = VisionTransformer(tiny(preprocessing=CLIP, num_layers=1))
    with pytest.warns(UserWarning, match="MediaPipe") as caught:
        export.tflite(model, tmp_path / "file.tflite", quantize="none")
    assert __file__ in [warning.filename for warning in caught if warning.category is UserWarning]


def test_colours_outputs_and_labels_are_told() -> None:
    for channels, colour in ((3, 1), (1, 2), (4, 0)):  # RGB, GRAYSCALE, UNKNOWN
        content = graph(made(num_channels=channels))[0].table(3)
        assert (content.byte(0), content.table(1).byte(0)) == (2, colour)  # 2 is ImageProperties
    _, outputs = graph(made(outputs=["probabilities", "attention"]))
    assert [output.text(0) for output in outputs] == ["probabilities", "attention"]
    assert [output.table(3).byte(0) for output in outputs] == [1, 1]  # FeatureProperties
    [labels] = outputs[0].tables(6)
    assert (labels.text(0), labels.byte(2)) == ("labels.txt", 2)  # TENSOR_AXIS_LABELS
    assert not outputs[1].offset(6)
    assert graph(made(has_labels=False))[1][0].offset(6) == 0


def test_labels_lie_behind_the_file_uncompressed_and_the_runtime_takes_both(tmp_path: Path) -> None:
    builder, path = Builder(), tmp_path / "file.tflite"
    image = builder.input("image", (1, 2))
    doubled = builder.operator("ADD", [image, image], ("logits", (1, 2), "float32"), options="AddOptions")
    builder.signature({"image": image}, {"logits": doubled})
    builder.metadata(metadata.BUFFER_NAME, made())
    builder.write(path)
    before = path.read_bytes()
    assert read_labels(path) == []
    contents = set()
    for _ in range(2):  # the same is written every time
        path.write_bytes(before)
        metadata.append_files(path, metadata.archive_files(tiny(), "uint8", 8, [*LABELS, "two\nlines", "Äpfel"]))
        contents.add(path.read_bytes())
    [content] = contents
    assert content.startswith(before)
    with zipfile.ZipFile(path) as archive:
        [entry] = archive.infolist()
        assert (entry.filename, entry.compress_type) == ("labels.txt", zipfile.ZIP_STORED)
        assert archive.read(entry).decode() == "zero\none\ntench, Tinca tinca\ntwo lines\nÄpfel\n"
    assert read_labels(path) == [*LABELS, "two lines", "Äpfel"]
    run = interpreter.Interpreter(model_path=str(path)).get_signature_runner()
    assert run(image=np.array([[1, 2]], np.float32))["logits"].tolist() == [[2, 4]]
