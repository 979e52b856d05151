"""Tokenizers of CLIP, SigLIP and SigLIP 2: texts to ids, as the official processors of transformers compute them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from keras_vit._util.checks import as_path, check_counts
from keras_vit._util.files import parse_object
from keras_vit._util.text import needs_extra, warn
from keras_vit.errors import CheckpointError

# The files of a tokenizer in a folder; the first of them that is there is read.
_FILES = ("spiece.model", "tokenizer.json", "vocab.json")
_MAX_BYTES = 64 << 20  # of one file; SigLIP 2's has 34 MB
_MAX_LENGTH = 1 << 20  # larger values of model_max_length mean that there is none
_MAX_PARTS = 4  # of a normalizer or pre-tokenizer, and characters that replace another; the families' have 3 and 1
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Kind(NamedTuple):
    """Tokens around the words, as a family of models was trained with them."""

    start: str | None
    end: str
    padding: str  # unless tokenizer_config.json says another


_KINDS = {
    "clip": Kind("<|startoftext|>", "<|endoftext|>", "<|endoftext|>"),
    "siglip": Kind(None, "</s>", "</s>"),
    "siglip2": Kind(None, "<eos>", "<pad>"),
}


class Tokenizer:
    """Convert texts to int32 ids (texts, length): start token, words, end token, padding on the right.

    Texts are cleaned as the official processor does: CLIP's are put into Unicode's normal form C and lower-cased,
    SigLIP's lower-cased without ASCII punctuation, SigLIP 2's lower-cased (as its models were trained;
    transformers' AutoTokenizer does not).

    Args:
        model: the content of a tokenizer.json, or of a SentencePiece model.
        length: number of ids of each text.
        padding: the padding token or its id; None means the family's.

    Raises:
        CheckpointError: the content is not a tokenizer of CLIP, SigLIP or SigLIP 2.
        ImportError: the packages of the extra "text" are missing.

    Example:
        >>> tokenizer = keras_vit.zoo.text_encoder("digits").tokenizer
        >>> tokenizer.kind, tokenizer(["seven", "a photo of a three."]).shape
        ('clip', (2, 40))
    """

    def __init__(self, model: bytes, *, length: int, padding: str | int | None = None) -> None:
        check_counts(length=length)
        self.model = model
        self.length = int(length)
        self.kind, self._engine = _open_engine(model)
        start, end, default_padding = _KINDS[self.kind]
        self._start = [] if start is None else [self._id(start)]
        self.end_id = self._id(end)
        padding = default_padding if padding is None else padding
        is_id = isinstance(padding, int) and not isinstance(padding, bool) and 0 <= padding < self.vocab_size
        if not is_id and not isinstance(padding, str):
            raise CheckpointError(f"has no padding token {padding!r:.100}: it is a token or an id < {self.vocab_size}")
        self.pad_id = padding if isinstance(padding, int) else self._id(padding)
        if self.length <= len(self._start):
            raise ValueError(f"length must be above {len(self._start)}. Received: {length}")

    @classmethod
    def load(cls, folder: str | os.PathLike[str], length: int | None = None) -> Self:
        """Read a tokenizer from the files of a Hugging Face repository.

        Args:
            folder: a folder with spiece.model, tokenizer.json, or vocab.json and merges.txt, and perhaps a
                tokenizer_config.json; or one such file.
            length: number of ids of each text; None takes `model_max_length` of tokenizer_config.json.

        Raises:
            FileNotFoundError: there is no tokenizer.
            CheckpointError: a file is damaged, or the tokenizer of another family.
            ValueError: the files do not state the length.
            ImportError: the packages of the extra "text" are missing.

        Example:
            >>> keras_vit.text.Tokenizer.load("missing")
            Traceback (most recent call last):
                ...
            FileNotFoundError: There is no file or folder 'missing'
        """
        path = Path(as_path(folder, "folder"))
        if not path.exists():
            raise FileNotFoundError(f"There is no file or folder {str(path)!r:.200}")
        file = find_tokenizer(path)
        if file is None:
            raise FileNotFoundError(f"{path} holds no tokenizer, which is one of {list(_FILES)}")
        config_file = file.with_name("tokenizer_config.json")
        try:
            config = parse_object(_read_bytes(config_file)) if config_file.is_file() else {}
            model = _read_bytes(file) if file.name != "vocab.json" else _clip_from_merges(file)
        except ValueError as error:
            raise CheckpointError(f"{file.parent}: a file of the tokenizer {error}") from error
        if length is None:
            length = config.get("model_max_length")
            if not isinstance(length, int) or not 0 < length < _MAX_LENGTH:
                raise ValueError(f"{path} does not say how long texts are: pass length=. Received: {length!r:.100}")
        if config.get("padding_side", "right") != "right":
            raise CheckpointError(
                f"{config_file}: padding_side must be 'right'. Received: {config['padding_side']!r:.100}"
            )
        padding = config.get("pad_token")
        if isinstance(padding, dict):
            padding = padding.get("content")
        try:
            return cls(model, length=length, padding=padding)
        except CheckpointError as error:
            raise CheckpointError(f"{file} {error}") from error

    @property
    def file_name(self) -> str:
        """Name of the file that has `model`."""
        return "spiece.model" if self.kind == "siglip" else "tokenizer.json"

    @property
    def facts(self) -> dict[str, Any]:
        """Settings that an app's own tokenizer needs besides the model."""
        return {"start_ids": self._start, "end_id": self.end_id, "pad_id": self.pad_id, "cleaning": self.kind}

    @property
    def vocab_size(self) -> int:
        """Number of ids, from 0 to the largest."""
        engine = self._engine
        return int(engine.get_piece_size() if self.kind == "siglip" else max(engine.get_vocab().values()) + 1)

    def __call__(self, texts: str | Iterable[str]) -> np.ndarray:
        """Convert one text or several to ids, int32 (texts, length); one warning says how many are cut.

        Raises:
            ValueError: there is no text, or something else than texts.
        """
        given = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else []
        if not given or not all(isinstance(text, str) for text in given):
            raise ValueError(f"texts must be a string or a list of at least one string. Received: {texts!r:.100}")
        if broken := [text for text in given if text.encode(errors="ignore").decode() != text]:
            raise ValueError(f"texts must be valid Unicode. Received: {broken[0]!r:.100}")
        room = self.length - len(self._start) - 1
        ids = np.full((len(given), self.length), self.pad_id, np.int32)
        num_cut = 0
        for row, words in zip(ids, self._encode(given), strict=True):
            num_cut += len(words) > room
            tokens = [*self._start, *words[:room], self.end_id]
            row[: len(tokens)] = tokens
        if num_cut:
            warn(f"keras_vit: {num_cut} of {len(given)} texts are longer than {self.length} tokens and were cut")
        return ids

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Convert the words of texts to ids."""
        if self.kind == "siglip":
            return [self._encode_pieces(text) for text in texts]
        if self.kind == "siglip2":
            texts = [text.lower() for text in texts]
        with _library_errors("cannot be used as a tokenizer"):
            return [encoding.ids for encoding in self._engine.encode_batch(texts, add_special_tokens=False)]

    def _encode_pieces(self, text: str) -> list[int]:
        """Convert a text to SentencePiece's ids.

        Tokens that are spelled out in it, such as "</s>", are not words, and what follows them begins no word: as in
        transformers, it is encoded behind other characters, whose ids are dropped.
        """
        before, *others = re.split("(</s>|<unk>)", text)
        ids: list[int] = self._engine.encode(_canonical(before))
        for token, after in zip(others[::2], others[1::2], strict=True):
            dropped = len(self._engine.encode("<unk>"))
            ids += [self._id(token), *self._engine.encode("<unk>" + _canonical(after))[dropped:]]
        return ids

    def _id(self, token: str) -> int:
        engine = self._engine
        found = engine.piece_to_id(token) if self.kind == "siglip" else engine.token_to_id(token)
        # A SentencePiece model has the id of <unk> for what it does not have.
        if found is None or (self.kind == "siglip" and engine.id_to_piece(found) != token):
            raise CheckpointError(f"is a tokenizer without the token {token!r:.100}")
        return int(found)


def _canonical(text: str) -> str:
    """Clean a text as SigLIP was trained: lower-cased, without ASCII punctuation, single spaces."""
    return " ".join(text.lower().translate(_NO_PUNCTUATION).split())


def find_tokenizer(path: Path) -> Path | None:
    """Find the file of a tokenizer at a path, which is the file or its folder."""
    if not path.is_dir():
        return path
    return next((path / name for name in _FILES if (path / name).is_file()), None)


def _read_bytes(path: Path) -> bytes:
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"has {path.stat().st_size:,} bytes; {path.name} has at most {_MAX_BYTES:,}")
    return path.read_bytes()


def import_libraries() -> tuple[Any, Any]:
    """Import tokenizers and sentencepiece, or raise an ImportError that says how to install them."""
    with needs_extra("A tokenizer", "text"):
        import sentencepiece
        import tokenizers
    return tokenizers, sentencepiece


def _open_engine(model: bytes) -> tuple[str, Any]:
    """Open a tokenizer with its library; return its key in `_KINDS` and the library's object."""
    tokenizers, sentencepiece = import_libraries()
    with _library_errors("cannot be read as a tokenizer"):
        if not model:
            raise ValueError("it is empty")
        if not model.lstrip().startswith(b"{"):
            return "siglip", sentencepiece.SentencePieceProcessor(model_proto=model)
        _check_parts(parse_object(model))
        engine = tokenizers.Tokenizer.from_buffer(model)
    engine.no_truncation()
    engine.no_padding()
    for kind in ("clip", "siglip2"):
        if engine.token_to_id(_KINDS[kind].end) is not None:
            return kind, engine
    raise CheckpointError("is not a tokenizer of CLIP, SigLIP or SigLIP 2: it has no end token of theirs")


@contextlib.contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """Raise a CheckpointError for the errors of the libraries: RuntimeError, bare Exception, a panic of Rust."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{problem}: {str(error)[:200]}") from error


_PARTS = {"normalizer": {"NFC", "Lowercase", "Replace"}, "pre_tokenizer": {"Split", "ByteLevel", "Whitespace"}}


def _check_parts(file: Mapping[str, Any]) -> None:
    """Raise a ValueError for a tokenizer.json with other parts than the families have.

    Other parts give other ids, take any memory (replacements that follow each other), or end the process.
    """
    model = file.get("model")
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE" or model.get("dropout"):
        raise ValueError("its model must be of the type BPE, without dropout")
    for name, known in _PARTS.items():
        part = file.get(name)
        inner = part.get("normalizers", part.get("pretokenizers")) if isinstance(part, Mapping) else None
        parts = [part] if part and inner is None else inner or []
        if not isinstance(parts, list) or len(parts) > _MAX_PARTS:
            raise ValueError(f"its {name} must have at most {_MAX_PARTS} parts")
        for one in parts:
            if not isinstance(one, Mapping) or one.get("type") not in known or not _is_harmless(one):
                raise ValueError(f"its {name} has a part of no known family: {json.dumps(one)[:200]}")


def _is_harmless(part: Mapping[str, Any]) -> bool:
    """True if a part makes texts hardly longer, and its regular expression takes linear time: it has no groups, and
    repeats once in each alternative.
    """
    pattern = part.get("pattern", {})
    expression = pattern.get("Regex", "") if isinstance(pattern, Mapping) else None
    if not isinstance(expression, str) or len(str(part.get("content", ""))) > _MAX_PARTS:
        return False
    plain = re.sub(r"\\[pP]\{\w+\}|\\.|\[[^\]]*\]", "x", expression)  # what stands for one character
    return "(" not in plain and all(len(re.findall(r"[+*?{]", choice)) <= 1 for choice in plain.split("|"))


def _clip_from_merges(vocab: Path) -> bytes:
    """Convert CLIP's vocab.json and merges.txt to a tokenizer.json (transformers/convert_slow_tokenizer.py)."""
    import tokenizers
    from tokenizers import normalizers, pre_tokenizers

    lines = _read_bytes(vocab.with_name("merges.txt")).decode().splitlines()
    merges: Any = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
    kind = _KINDS["clip"]
    numbers: Any = parse_object(_read_bytes(vocab))
    model = tokenizers.models.BPE(
        vocab=numbers, merges=merges, unk_token=kind.end, continuing_subword_prefix="", end_of_word_suffix="</w>"
    )
    engine = tokenizers.Tokenizer(model)
    squeeze = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    engine.normalizer = normalizers.Sequence([normalizers.NFC(), squeeze, normalizers.Lowercase()])
    words = tokenizers.Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    split = pre_tokenizers.Split(words, behavior="removed", invert=True)
    engine.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    engine.add_special_tokens([tokenizers.AddedToken(token, normalized=True) for token in (kind.start, kind.end)])
    return json.dumps(json.loads(engine.to_str()), separators=(",", ":")).encode()
