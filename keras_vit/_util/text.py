"""Nearest names, readable sizes and install commands for messages and tables."""

import contextlib
import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType

PACKAGE = "keras_vit"
DISTRIBUTION = "keras-vit-zoo"  # on a package index; `keras-vit` there is another project
TIMES = ((86_400, "days"), (3_600, "hours"), (60, "minutes"), (1, "seconds"))
# TensorFlow puts these around a reason.
GRAPH_NAMES = re.compile(
    r"Error in user-defined function passed to \S+ transformation with iterator: \S+ "
    r"|\{\{.*?\}\} ?|\s*\[Op:[^]]*\](?: name:\s?\S*)?"
    r"|Graph execution error:\s+(?:Detected at .*\n(?:\s*(?:File .*)?\n)*)?"
)

# Arguments and functions of Keras, timm and transformers -> what does the same here; docs/load-and-convert.md has more.
OTHER_WORDS = {
    "pretrained": "weights='default', or weights=None for random ones",
    "checkpoint_path": "weights",
    "include_top": "num_classes=0 for a model without a head",
    "classes": "num_classes",
    "num_labels": "num_classes",
    "nb_classes": "num_classes",
    "input_shape": "image_size, and num_channels",
    "input_size": "image_size",
    "img_size": "image_size",
    "in_chans": "num_channels",
    "pooling": "classifier ('token', 'gap', 'token_gap' or 'map')",
    "global_pool": "classifier ('token', 'gap', 'token_gap' or 'map')",
    "drop_rate": "dropout_rate",
    "hidden_dropout_prob": "dropout_rate",
    "attn_drop_rate": "attention_dropout_rate",
    "attention_probs_dropout_prob": "attention_dropout_rate",
    "drop_path_rate": "stochastic_depth",
    "embed_dim": "hidden_size",
    "depth": "num_layers",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "mlp_ratio": "mlp_dim, in channels",
    "intermediate_size": "mlp_dim",
    "init_values": "layer_scale",
    "reg_tokens": "num_registers",
    "n_cls_tokens": "num_class_tokens",
    "torch_dtype": "dtype",
    "load": "keras_vit.zoo.load(name or path)",
    "load_model": "keras_vit.zoo.load(name or path)",
    "create_model": "keras_vit.zoo.load(name or path)",
    "from_pretrained": "keras_vit.zoo.load(name or path)",
    "list_models": "keras_vit.zoo.names()",
}


def in_our_words(names: Iterable[str]) -> str:
    """Translate names of other libraries' arguments: "num_labels is here num_classes"; "" if none is known."""
    return "; ".join(f"{name} is here {OTHER_WORDS[name]}" for name in names if name in OTHER_WORDS)


def nearest(name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Find at most `count` known names with a similarity of at least `cutoff` (0..1), the best first."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=cutoff)


def suggestion(name: str, known: Iterable[str]) -> str:
    """End an error about an unknown name: "the nearest is 'digits'", or all known names."""
    known = list(known)
    found = nearest(name, known)
    return f"the nearest is {found[0]!r}" if found else f"known are {sorted(known)}"


def abbreviated(names: Sequence[str], count: int = 5) -> str:
    """List the first names and count the others; bytes of file names that are not valid UTF-8 are escaped."""
    text = ", ".join(names[:count]) + (f" and {len(names) - count:,} more" if len(names) > count else "")
    return escaped(text)


def text_lines(data: bytes, name: str) -> list[str]:
    """Split a text file in UTF-8 into its lines, without space around them, nor empty lines at the end.

    `str.splitlines` also splits at form feeds, U+2028 and others, which a name of a class may have.

    Raises:
        ValueError: the file, of this name, is in another encoding.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name} must be saved as UTF-8. Received: other bytes in line {line}") from None
    lines = [line.strip() for line in re.split(r"\r\n|\r|\n", text.rstrip())]
    return lines if text.strip() else []


def error_reason(text: str) -> str:
    """Shorten a message of TensorFlow to its first line, without the names of functions and operations."""
    lines = (line.strip() for line in GRAPH_NAMES.sub("", text).splitlines())
    return next(filter(None, lines), "without a reason")


def escaped(text: str) -> str:
    """Escape the bytes of file names that are not valid UTF-8, for messages and reports."""
    return text.encode(errors="backslashreplace").decode()


def printable(text: str, *, keep: str = "") -> str:
    """Escape what a terminal would not print as text, such as the codes that clear it, except the characters `keep`."""
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def byte_size(size: float) -> str:
    """Format a number of bytes with a binary unit and about three digits, such as "330 MiB"."""
    return scaled(size, 1024, (" bytes", " KiB", " MiB", " GiB"))


def duration(seconds: float) -> str:
    """Format a time in words with about two digits, such as "6.7 hours".

    >>> duration(24_120)
    '6.7 hours'
    """
    size, unit = next((pair for pair in TIMES if seconds >= 1.5 * pair[0]), TIMES[-1])
    return f"{seconds / size:,.{1 if seconds / size < 9.95 else 0}f} {unit}"


def image_rate(speed: float) -> str:
    """Format a speed, never a slow one as 0.

    >>> image_rate(1234.5), image_rate(0.163)
    ('1,234 images/s', '0.16 images/s')
    """
    return f"{speed:,.0f} images/s" if speed >= 9.95 else f"{speed:.2g} images/s"


def scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    """Format a number from 0 with about three digits and a unit; each unit is `base` times the one before."""
    power = 0
    while number >= 1000 * base**power and power < len(units) - 1:
        power += 1
    value = number / base**power
    digits = 0 if power == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f}{units[power]}"


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, with the line outside of this package that called it."""
    level, called = 1, 1
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
            called = level + 1
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=called)


@contextlib.contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Turn the error of an import in the block into one that says what needs the package, and how to install it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what} needs the package {error.name}: {install_command(extra)}") from error


def install_command(extra: str) -> str:
    """Command that installs the packages of one of the extras in setup.cfg.

    >>> install_command("litert")
    'pip install "keras-vit-zoo[litert]"'
    """
    return f'pip install "{DISTRIBUTION}[{extra}]"'
