"""Text to token ids: bytes of UTF-8, or a Hugging Face tokenizer.json."""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ling_trainer.data.index_file import DataError

BYTE_EOD_ID = 256
"""Ends a document; the padding token as well."""
BYTE_VOCAB_SIZE = 512


class TextTokenizer(Protocol):
    """What tokenizes documents."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def eod_id(self) -> int | None:
        """Token that ends a document; None if documents are not to be ended."""
        ...

    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.int32]]:
        """Tokenize documents, UTF-8 each, without their ends."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8."""

    eod_id: int | None = BYTE_EOD_ID
    vocab_size: int = BYTE_VOCAB_SIZE

    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.int32]]:
        """Tokenize documents, UTF-8 each, without their ends."""
        return [np.frombuffer(text, np.uint8).astype(np.int32) for text in texts]


@dataclass(frozen=True, eq=False)
class HuggingFaceTokenizer:
    """A tokenizer.json. Make one with `load_tokenizer`.

    As with Hugging Face's own, a special token that is spelled out in a text becomes that token.
    """

    tokenizer: Any
    eod_id: int | None
    vocab_size: int

    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.int32]]:
        """Tokenize documents, UTF-8 each, without their ends and other special tokens."""
        decoded = [text.decode() for text in texts]
        encodings = self.tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


def load_tokenizer(path: str | os.PathLike[str], *, eod_token: str | None) -> HuggingFaceTokenizer:
    """Read a tokenizer.json.

    Args:
      path: of the file.
      eod_token: token that ends documents, as the vocabulary spells it; None ends none.

    Raises:
      DataError: the file cannot be read, is no tokenizer, or has no such token.
    """
    from tokenizers import Tokenizer

    if not Path(path).is_file():
        raise DataError(f"{path}: is no file; name a tokenizer.json (--tokenizer)")
    try:
        tokenizer = Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"{path}: is not a Hugging Face tokenizer.json ({error}); name one (--tokenizer)"
        ) from error
    # A file may ask for both, for a model's batches.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"{path}: has no token; name another tokenizer.json (--tokenizer)")
    eod_id = None
    if eod_token is not None:
        eod_id = vocabulary.get(eod_token)
        if eod_id is None:
            raise DataError(f"{path}: {_no_token(eod_token, tokenizer, vocabulary)}")
    return HuggingFaceTokenizer(tokenizer, eod_id, max(vocabulary.values()) + 1)


def _no_token(wanted: str, tokenizer: Any, vocabulary: dict[str, int]) -> str:
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    near = difflib.get_close_matches(wanted, [*special, *vocabulary], n=3)
    known = ", ".join(dict.fromkeys([*near, *special[:10]])) or "none"
    return f"has no token {wanted!r}; name one of its own (--eod-token), such as {known}"
