"""Text becomes .bin/.idx, or an error that says which byte of which line is at fault."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_trainer.cli import main
from ling_trainer.data.build import build_dataset, unigram_entropy
from ling_trainer.data.index_file import DataError
from ling_trainer.data.indexed import IndexedDataset
from ling_trainer.data.indexed_writer import write_indexed
from ling_trainer.data.tokenizer import (
    BYTE_EOD_ID,
    BYTE_VOCAB_SIZE,
    ByteTokenizer,
    load_tokenizer,
)


def write(path: Path, raw: bytes | str) -> Path:
    path.write_bytes(raw.encode() if isinstance(raw, str) else raw)
    return path


def texts(prefix: Path, *, eod: bool = True) -> list[str]:
    dataset = IndexedDataset.open(prefix)
    documents = []
    for i in range(len(dataset)):
        ids = dataset.read(i)
        if eod:
            assert ids[-1] == BYTE_EOD_ID
            ids = ids[:-1]
        documents.append(ids.astype(np.uint8).tobytes().decode())
    return documents


def test_files_and_json_lines_become_documents_in_order(tmp_path: Path) -> None:
    first = write(tmp_path / "a.py", "x = 'caf\u00e9'\n")
    lines = '{"text": "one\\ntwo", "n": 1}\r\n\n{"text": ""}\n{"text": "\\u4e16\\u754c"}'
    second = write(tmp_path / "b.jsonl", lines)
    third = write(tmp_path / "empty.txt", "")
    seen: list[tuple[int, int]] = []
    report = build_dataset(
        [first, second, third],
        tmp_path / "out" / "corpus.v1",
        progress=lambda read, total: seen.append((read, total)),
    )
    assert texts(tmp_path / "out" / "corpus.v1") == [
        "x = 'caf\u00e9'\n",
        "one\ntwo",
        "\u4e16\u754c",
    ]
    dataset = IndexedDataset.open(tmp_path / "out" / "corpus.v1")
    assert dataset.dtype == np.uint16
    assert dataset.index.documents.tolist() == [0, 1, 2, 3]
    assert (report.documents, report.empty_documents) == (3, 2)
    assert report.tokens == dataset.num_tokens == 13 + 8 + 7
    assert (report.vocab_size, report.eod_id) == (512, 256)
    assert seen[-1] == (seen[-1][1], len("x = 'caf\u00e9'\n".encode()) + len(lines))
    assert sorted(seen) == seen


def test_the_end_of_document_can_be_left_out_and_the_key_be_another(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", '{"body": "ab"}\n')
    report = build_dataset(
        [source], tmp_path / "out", jsonl_key="body", tokenizer=ByteTokenizer(eod_id=None)
    )
    assert report.tokens == 2
    assert texts(tmp_path / "out", eod=False) == ["ab"]


@settings(max_examples=15, deadline=None)  # each build waits for the disk
@given(documents=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=5))
def test_any_unicode_survives(
    documents: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("build")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    build_dataset([write(folder / "a.ndjson", lines)], folder / "out")
    assert texts(folder / "out") == documents
    assert np.fromfile(folder / "out.bin", np.uint16).max() < BYTE_VOCAB_SIZE


@pytest.mark.parametrize(
    ("name", "raw", "byte", "says"),
    [
        ("a.txt", b"ok\nno\n\xff!", 6, "line 3 is not UTF-8 (0xff"),
        ("a.txt", b"ok\n\xe4\xb8", 3, "line 2 is not UTF-8 (0xe4"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', 24, "line 2 is not UTF-8"),
        ("a.jsonl", '{"text": "\u00e9"}\n{"text": "\u00e9" x}'.encode(), 29, "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', 27, "line 2 is not JSON"),
        ("a.JSON", b'{\n"text": "a"}\n', 2, "line 1 is not JSON"),
        ("a.jsonl", b"[" * 100_000, 0, "line 1 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', 14, 'a string under "text"'),
        ("a.jsonl", b'{"text": "a"}\n{"text": 5}\n', 14, 'a string under "text"'),
        ("a.jsonl", b'{"text": "a"}\n["text"]\n', 14, 'a string under "text"'),
        ("a.jsonl", b'{"text": "a\\ud800"}\n', 0, "half a surrogate pair at character 1"),
    ],
)
def test_bad_input_is_named_with_its_line_and_byte_and_writes_nothing(
    name: str, raw: bytes, byte: int, says: str, tmp_path: Path
) -> None:
    path = write(tmp_path / name, raw)
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError) as caught:
        build_dataset([path], tmp_path / "out" / "corpus")
    message = str(caught.value)
    assert message.startswith(f"{path}, byte {byte}: "), message
    assert says in message
    assert not list((tmp_path / "out").iterdir())


def test_missing_files_and_folders_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    good = write(tmp_path / "a.txt", "a")
    with pytest.raises(DataError, match=r"b\.txt: does not exist"):
        build_dataset([good, tmp_path / "b.txt"], tmp_path / "out")
    with pytest.raises(DataError, match="is a folder; name the files"):
        build_dataset([good, tmp_path], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_input_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hold no text"):
        build_dataset([write(tmp_path / "a.txt", "")], tmp_path / "out")
    with pytest.raises(DataError, match=r"inputs \(nothing\)"):
        build_dataset([], tmp_path / "out")


def test_unigram_entropy_is_that_of_the_token_frequencies(tmp_path: Path) -> None:
    build_dataset(
        [write(tmp_path / "a.txt", "aabbbbbb")],
        tmp_path / "ab",
        tokenizer=ByteTokenizer(eod_id=None),
    )
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert unigram_entropy(tmp_path / "ab") == pytest.approx(expected, rel=1e-12)
    build_dataset([write(tmp_path / "b.txt", "aba")], tmp_path / "aba")
    expected = 0.5 * math.log(2) + 2 * 0.25 * math.log(4)
    assert unigram_entropy(tmp_path / "aba") == pytest.approx(expected, rel=1e-12)


def test_unigram_entropy_refuses_data_without_meaning(tmp_path: Path) -> None:
    with write_indexed(tmp_path / "none", np.uint16):
        pass
    with pytest.raises(DataError, match=r"none\.idx: no tokens"):
        unigram_entropy(tmp_path / "none")
    with write_indexed(tmp_path / "negative", np.int32) as writer:
        writer.add_sequence([1, -1])
        writer.end_document()
    with pytest.raises(DataError, match=r"negative\.bin, byte 4: negative token id"):
        unigram_entropy(tmp_path / "negative")


# A tokenizer.json.

WORDS = ["<unk>", "<bos>", "<end>", "the", "cat", "sat", "mat"]


def write_tokenizer(path: Path, words: list[str] = WORDS) -> Path:
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<bos>", "<end>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_makes_the_ids_and_names_the_end(tmp_path: Path) -> None:
    lines = '{"text": "the cat sat the mat"}\n{"text": ""}\n{"text": "dog <end> cat"}\n'
    source = write(tmp_path / "a.jsonl", lines)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json"), eod_token="<end>")
    report = build_dataset([source], tmp_path / "out", tokenizer=tokenizer)
    dataset = IndexedDataset.open(tmp_path / "out")
    assert dataset.dtype == np.uint16
    # Neither the file's truncation and padding nor its <bos>; a special token in the text is one.
    assert [dataset.read(i).tolist() for i in range(2)] == [[3, 4, 5, 3, 6, 2], [0, 2, 4, 2]]
    assert (report.vocab_size, report.eod_id) == (7, 2)
    assert (report.documents, report.empty_documents, report.tokens) == (2, 1, 10)


@pytest.mark.parametrize(("size", "dtype"), [(65_499, "uint16"), (65_500, "int32")])
def test_the_vocabulary_decides_the_dtype(size: int, dtype: str, tmp_path: Path) -> None:
    words = [*WORDS, *(f"w{i}" for i in range(size - len(WORDS)))]
    path = write_tokenizer(tmp_path / "t.json", words)
    source = write(tmp_path / "a.txt", f"the w{size - len(WORDS) - 1}")
    tokenizer = load_tokenizer(path, eod_token="<end>")
    report = build_dataset([source], tmp_path / "out", tokenizer=tokenizer)
    dataset = IndexedDataset.open(tmp_path / "out")
    assert report.vocab_size == size
    assert dataset.dtype == np.dtype(dtype)
    assert dataset.read(0).tolist() == [3, size - 1, 2]


def test_documents_keep_their_order_whatever_their_number_and_size(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sizes = random.integers(1, 40, 3000)
    sizes[1500] = 400_000
    documents = [random.choice(WORDS[3:], size).tolist() for size in sizes]
    lines = "".join(json.dumps({"text": " ".join(words)}) + "\n" for words in documents)
    source = write(tmp_path / "a.jsonl", lines)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json"), eod_token=None)
    build_dataset([source], tmp_path / "out", tokenizer=tokenizer)
    dataset = IndexedDataset.open(tmp_path / "out")
    assert len(dataset) == 3000
    for i, words in enumerate(documents):
        assert [WORDS[id_] for id_ in dataset.read(i)] == words


def test_the_command_builds_with_a_tokenizer_and_says_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "a.txt", "the cat")
    tokenizer = str(write_tokenizer(tmp_path / "t.json"))
    build = ["data", "build", "--input", str(source), "--output", str(tmp_path / "out")]
    assert main([*build, "--tokenizer", tokenizer, "--eod-token", "<end>"]) == 0
    assert "vocab_size >= 7, eod_id=2\n" in capsys.readouterr().out
    assert IndexedDataset.open(tmp_path / "out").read(0).tolist() == [3, 4, 2]
    assert main([*build, "--tokenizer", tokenizer, "--no-eod"]) == 0
    assert "no document was ended" in capsys.readouterr().out
    assert IndexedDataset.open(tmp_path / "out").read(0).tolist() == [3, 4]
    for wrong in (["--tokenizer", tokenizer], ["--eod-token", "<end>"]):
        assert main([*build, *wrong]) == 2
        assert "--eod-token" in capsys.readouterr().err


def test_a_bad_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"t\.json: is no file"):
        load_tokenizer(tmp_path / "t.json", eod_token=None)
    write(tmp_path / "t.json", '{"model": 3}')
    with pytest.raises(DataError, match=r"t\.json: is not a Hugging Face tokenizer"):
        load_tokenizer(tmp_path / "t.json", eod_token=None)
    write_tokenizer(tmp_path / "t.json")
    with pytest.raises(DataError, match=r"has no token '<ende>'; .* such as <end>"):
        load_tokenizer(tmp_path / "t.json", eod_token="<ende>")
