"""Text to Megatron .bin/.idx."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ling_trainer.data.index_file import DataError, bad_byte, optimal_dtype
from ling_trainer.data.indexed import IndexedDataset
from ling_trainer.data.indexed_writer import write_indexed
from ling_trainer.data.tokenizer import ByteTokenizer, TextTokenizer

type Progress = Callable[[int, int], None]
"""Told now and then, and at the end: bytes read, bytes in all."""

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
_MAX_DOCUMENT_BYTES = np.iinfo(np.int32).max - 1
_CHUNK_TOKENS = 1 << 24
_GROUP_BYTES = 1 << 20
_GROUP_DOCUMENTS = 1024


@dataclass(frozen=True)
class BuildReport:
    """What a build wrote.

    Attributes:
      prefix: path of the pair without endings.
      documents: documents written.
      empty_documents: documents without text, left out.
      tokens: tokens written, ends of documents included.
      vocab_size: what model.vocab_size must be at least.
      eod_id: what data.eod_id must be, None where documents were not ended.
    """

    prefix: Path
    documents: int
    empty_documents: int
    tokens: int
    vocab_size: int
    eod_id: int | None


def build_dataset(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    *,
    jsonl_key: str = "text",
    tokenizer: TextTokenizer | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Tokenize files into output_prefix.bin and output_prefix.idx.

    A file that ends in .jsonl, .ndjson or .json holds a document a line (of JSON), any other file
    is one document; documents keep the order of inputs. Nothing is written when any of them is at
    fault.

    Args:
      inputs: UTF-8 files.
      output_prefix: its folder is made if need be.
      jsonl_key: the field of a JSON line that holds the text.
      tokenizer: makes token ids and says what ends a document; None: bytes. Its vocabulary decides
        whether tokens are stored in two bytes or four.
      progress: told how far it is.

    Raises:
      DataError: a file is missing, not UTF-8, not JSON lines, lacks the key, or there is no text
        at all. It names the file, the line and the byte.
    """
    paths = [Path(path) for path in inputs]
    total = sum(_size(path) for path in paths)
    prefix = Path(output_prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or ByteTokenizer()
    documents = empty = tokens = 0
    with write_indexed(prefix, optimal_dtype(tokenizer.vocab_size)) as writer:
        for group in _groups(_documents(paths, jsonl_key)):
            texts = [text for _, text in group if text]
            empty += len(group) - len(texts)
            for ids in tokenizer.encode(texts):
                ended = ids if tokenizer.eod_id is None else np.append(ids, tokenizer.eod_id)
                writer.add_sequence(ended)
                writer.end_document()
                documents += 1
                tokens += len(ended)
            if progress is not None:
                progress(group[-1][0], total)
        if not documents:
            names = ", ".join(map(str, paths[:3])) or "nothing"
            raise DataError(f"inputs ({names}) hold no text; name files that do")
    return BuildReport(prefix, documents, empty, tokens, tokenizer.vocab_size, tokenizer.eod_id)


def _groups(documents: Iterable[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """Gather documents, so that a tokenizer can use every core at once."""
    group: list[tuple[int, bytes]] = []
    size = 0
    for read, text in documents:
        group.append((read, text))
        size += len(text)
        if size >= _GROUP_BYTES or len(group) >= _GROUP_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def unigram_entropy(prefix: str | os.PathLike[str]) -> float:
    """Compute the entropy of a dataset's token frequencies, in nats.

    It is the lowest loss of a model that ignores the context; a loss below it shows that the model
    has learned from the context.

    Raises:
      DataError: the files are damaged, or hold no token or a negative one.
    """
    indexed = IndexedDataset.open(prefix)
    counts = np.zeros(1, np.int64)
    for start in range(0, indexed.num_tokens, _CHUNK_TOKENS):
        stop = min(start + _CHUNK_TOKENS, indexed.num_tokens)
        chunk = indexed.reader.read([range(start, stop)])[0]
        if chunk.min() < 0:
            byte = (start + int((chunk < 0).argmax())) * indexed.dtype.itemsize
            raise bad_byte(
                f"{indexed.prefix}.bin", byte, "negative token id", "rebuild the dataset"
            )
        found = np.bincount(chunk, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    if not counts.any():
        raise DataError(f"{indexed.prefix}.idx: no tokens; rebuild the dataset")
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _size(path: Path) -> int:
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path}: {kind}; name the files to tokenize")
    return path.stat().st_size


def _documents(paths: Iterable[Path], jsonl_key: str) -> Iterator[tuple[int, bytes]]:
    """Yield each document's UTF-8 with the bytes read so far."""
    before = 0
    for path in paths:
        size = _size(path)
        if path.suffix.lower() in JSONL_SUFFIXES:
            for read, text in _json_lines(path, jsonl_key):
                yield before + read, text
        elif size > _MAX_DOCUMENT_BYTES:
            raise DataError(
                f"{path}: {size} bytes are more than a document can hold ({_MAX_DOCUMENT_BYTES}); "
                "split it, or write it as JSON lines"
            )
        else:
            raw = path.read_bytes()
            _check_utf8(path, raw, line=1, start=0)
            yield before + size, raw
        before += size


def _json_lines(path: Path, key: str) -> Iterator[tuple[int, bytes]]:
    """Yield each line's text with the bytes read so far; blank lines are passed over."""
    start = 0
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if raw.strip():
                yield start + len(raw), _json_text(path, raw, key, line=line, start=start)
            start += len(raw)


def _json_text(path: Path, raw: bytes, key: str, *, line: int, start: int) -> bytes:
    text = _check_utf8(path, raw, line=line, start=start)
    try:
        record = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        position = error.pos if isinstance(error, json.JSONDecodeError) else 0
        byte = start + len(text[:position].encode())
        problem = f"line {line} is not JSON ({error})"
        raise bad_byte(path, byte, problem, "write one JSON object a line") from error
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        problem = f'line {line} is not an object with a string under "{key}"'
        raise bad_byte(path, start, problem, "correct the line, or name the field (--jsonl-key)")
    try:
        return record[key].encode()
    except UnicodeEncodeError as error:
        problem = f'line {line}: "{key}" holds half a surrogate pair at character {error.start}'
        raise bad_byte(path, start, problem, "write the text as valid Unicode") from error


def _check_utf8(path: Path, raw: bytes, *, line: int, start: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        at = line + raw.count(b"\n", 0, error.start)
        problem = f"line {at} is not UTF-8 (0x{raw[error.start]:02x}: {error.reason})"
        byte = start + error.start
        raise bad_byte(path, byte, problem, "convert the file to UTF-8") from error
