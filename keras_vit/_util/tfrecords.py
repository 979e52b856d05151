"""Check files of TFRecords before TensorFlow reads them: it allocates the length that a record states."""

import struct
from typing import Any

HEAD, TAIL = 12, 4  # bytes before a record (its length, and a checksum) and after it (a checksum)


def count_records(path: str) -> tuple[int, str | None]:
    """Return the number of records that fit into the file, and what is wrong with the next one, if there is one."""
    opened: Any
    if "://" in path:
        import tensorflow as tf

        opened = tf.io.gfile.GFile(path, "rb")
    else:
        opened = open(path, "rb")  # noqa: PTH123, SIM115
    with opened as file:
        file.seek(0, 2)
        size, place, count = file.tell(), 0, 0
        while place < size:
            file.seek(place)
            head = file.read(HEAD)
            length = struct.unpack("<Q", head[:8])[0] if len(head) == HEAD else 0
            if len(head) < HEAD or length > size - place - HEAD - TAIL:
                rest = f"{size - place:,} bytes are left in the file"
                return count, f"{path!r}: record {count} states a length of {length:,} bytes, and {rest}"
            place += HEAD + length + TAIL
            count += 1
    return count, None
