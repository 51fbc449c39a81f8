"""From a data path to datasets: each pair of files opened once, indices built, loaded or kept."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ling_trainer.data.blend import (
    Blend,
    BlendIndex,
    build_blend_index,
    build_exhaustive_blend_index,
    member_sizes,
    normalize,
    parse_blend,
)
from ling_trainer.data.gpt import GPTIndex, SplitName, build_index, split_documents
from ling_trainer.data.index_cache import Arrays, cached_arrays
from ling_trainer.data.index_file import DataError
from ling_trainer.data.indexed import IndexedDataset
from ling_trainer.data.packing import effective_pad_id
from ling_trainer.data.ready_index import (
    BLEND_ARRAYS,
    GPT_ARRAYS,
    load_blend_index,
    load_gpt_index,
)
from ling_trainer.data.samples import BlendedDataset, GPTDataset
from ling_trainer.data_config import DataConfig

type Dataset = GPTDataset | BlendedDataset


class DatasetOpener:
    """Opens the datasets of one split, each pair of files once."""

    def __init__(self, data: DataConfig, *, vocab_size: int, split_name: SplitName) -> None:
        self._data = data
        self._vocab_size = vocab_size
        self._split_name: SplitName = split_name
        self._own_path = data.split_path(split_name) is not None
        self._blend = self._parse()
        opened = _open_all(self._blend.prefixes, data)
        self._indexed = [opened[prefix] for prefix in self._blend.prefixes]
        self._hashes: dict[str, str] = {}

    def _parse(self) -> Blend:
        data, name = self._data, self._split_name
        path = data.split_path(name)
        if path is None and data.dataset_path is None:
            raise DataError(f"data.{name}_data_path is not set; name the data of the {name} split")
        text = path or data.dataset_path or ""
        try:
            return parse_blend(text, with_index_folders=data.dataset_type == "mmap_npy")
        except ValueError as error:
            raise DataError(
                f"data.{f'{name}_data' if path else 'dataset'}_path: {error}"
            ) from error

    def content(self) -> tuple[str, ...]:
        """Describe each dataset by hashes of its files, with its weight where there is one."""
        blend, members = self._blend, []
        for number, indexed in enumerate(self._indexed):
            text = f"sha256:{self._hash(indexed)}"
            if blend.index_folders is not None:
                text += f" in the order of {_folder_hash(blend.index_folders[number], GPT_ARRAYS)}"
            if blend.weights is not None:
                text += f" x {blend.weights[number]!r}"
            members.append(text)
        if self._data.blend_index_dir is not None and len(members) > 1:
            members.append(f"in turns of {_folder_hash(self._data.blend_index_dir, BLEND_ARRAYS)}")
        return tuple(members)

    def _hash(self, indexed: IndexedDataset) -> str:
        if indexed.prefix not in self._hashes:
            self._hashes[indexed.prefix] = indexed.index.sha256()
        return self._hashes[indexed.prefix]

    def open(self, num_samples: int | None, *, seed: int) -> Dataset:
        """Build or load the indices of num_samples, or of one epoch for None.

        Returns:
          The samples; fewer than asked for where a blend without weights or ready-made indices
          have no more.
        """
        weights = self._blend.weights
        # With a path of its own for each split, Megatron drops the weight of a single dataset.
        if len(self._indexed) == 1 and (weights is None or self._own_path):
            return self._member(0, num_samples, seed=seed)
        if weights is not None and num_samples is None:
            raise DataError("data blended by weight have no epoch; say how many samples")
        shares = None if weights is None else normalize(weights)
        sizes = self._member_sizes(shares, num_samples)
        members = [self._member(i, size, seed=seed) for i, size in enumerate(sizes)]
        index = self._blend_index(shares, members, num_samples)
        _check_turns(index, members, self._blend)
        return BlendedDataset(members, index)

    def _member_sizes(
        self, shares: Sequence[float] | None, num_samples: int | None
    ) -> list[int] | list[None]:
        if shares is None or num_samples is None:
            return [None] * len(self._indexed)
        return member_sizes(shares, num_samples, surplus=self._data.mid_level_dataset_surplus)

    def _blend_index(
        self, shares: Sequence[float] | None, members: Sequence[Dataset], num_samples: int | None
    ) -> BlendIndex:
        data, lengths = self._data, [len(member) for member in members]
        if data.blend_index_dir is not None:
            return load_blend_index(data.blend_index_dir, len(members))
        if num_samples is None:
            key = {"kind": "exhaustive blend", "lengths": lengths}
            arrays = cached_arrays(
                data.blend_cache_dir, key, lambda: vars(build_exhaustive_blend_index(lengths))
            )
            return BlendIndex(**arrays)
        if shares is None:
            weights, size = normalize(lengths), min(num_samples, sum(lengths))
        else:
            weights, size = list(shares), sum(member_sizes(shares, num_samples))
        key = {"kind": "blend", "weights": weights, "num_samples": size}
        arrays = cached_arrays(
            data.blend_cache_dir, key, lambda: vars(build_blend_index(weights, size))
        )
        return BlendIndex(**arrays)

    def _member(self, number: int, num_samples: int | None, *, seed: int) -> GPTDataset:
        data, indexed = self._data, self._indexed[number]
        cacheable = not (
            data.eod_mask_loss or data.reset_position_ids or data.reset_attention_mask
        )
        return GPTDataset(
            indexed,
            self._index(number, num_samples, seed=seed),
            sequence_length=data.max_target_length,
            vocab_size=self._vocab_size,
            pad_id=effective_pad_id(
                eod_id=data.eod_id,
                pad_id=data.pad_id,
                allow_ambiguous=data.allow_ambiguous_pad_tokens,
            ),
            extra_token=data.add_extra_token_to_sequence,
            with_first_text=data.reproduce_cached_loss_mask and cacheable,
        )

    def _index(self, number: int, num_samples: int | None, *, seed: int) -> GPTIndex:
        data, indexed, length = self._data, self._indexed[number], self._data.max_target_length
        if self._blend.index_folders is not None:
            folder = self._blend.index_folders[number]
            return load_gpt_index(folder, indexed.index, sequence_length=length)
        split: str = "1" if self._own_path else data.split
        part: SplitName = "train" if self._own_path else self._split_name
        try:
            documents = split_documents(split, len(indexed), part)
            if not documents:
                raise ValueError(
                    f"none of {len(indexed)} documents; give it a larger share or add documents"
                )
            return self._built(indexed, documents, num_samples, seed)
        except ValueError as error:
            where = f"{indexed.prefix}.idx, {self._split_name} part of split={split}"
            raise DataError(f"{where}: {error}") from error

    def _built(
        self, indexed: IndexedDataset, documents: range, num_samples: int | None, seed: int
    ) -> GPTIndex:
        data = self._data
        keep_partial = not data.drop_last_partial_validation_sequence
        settings: dict[str, Any] = {
            "num_samples": num_samples,
            "sequence_length": data.max_target_length,
            "seed": seed,
            "extra_token": data.add_extra_token_to_sequence,
            "drop_last_partial": not (keep_partial and self._split_name == "valid"),
        }

        def build() -> Arrays:
            numbers = np.arange(documents.start, documents.stop, dtype=np.int32)
            index = build_index(indexed.index.lengths, numbers, **settings)
            return {name: getattr(index, name) for name in GPT_ARRAYS}

        key: dict[str, Any] = {}
        if data.blend_cache_dir is not None:
            key = {"kind": "gpt", "idx": self._hash(indexed), **settings}
            key["documents"] = [documents.start, documents.stop]
        arrays = cached_arrays(data.blend_cache_dir, key, build)
        epochs = len(arrays["document_index"]) // len(documents)
        return GPTIndex(**arrays, num_epochs=epochs)


def _open_all(prefixes: Iterable[str], data: DataConfig) -> dict[str, IndexedDataset]:
    """Open each pair once."""
    opened: dict[str, IndexedDataset] = {}
    remote = [prefix for prefix in prefixes if prefix.startswith("gs://")]
    if remote:
        # Google's client takes a while to import, and local data need none of it.
        from ling_trainer.data.gcs import Storage
        from ling_trainer.data.remote import open_remote

        storage = Storage(timeout=data.storage_timeout)
        for prefix in remote:
            opened[prefix] = open_remote(
                prefix, cache_folder=data.blend_cache_dir, storage=storage
            )
    for prefix in prefixes:
        if prefix not in opened:
            opened[prefix] = IndexedDataset.open(prefix)
    return opened


def _check_turns(index: BlendIndex, members: Sequence[Dataset], blend: Blend) -> None:
    """Check that no dataset is asked for more samples than it has."""
    turns = np.bincount(index.dataset_index, minlength=len(members))
    for number, (asked, member) in enumerate(zip(turns.tolist(), members, strict=True)):
        if asked > len(member):
            raise DataError(
                f"dataset {number} of the blend ({blend.prefixes[number]}) has {len(member)} "
                f"samples and gets {asked} turns; raise data.mid_level_dataset_surplus"
            )


def _folder_hash(folder: str, names: tuple[str, ...]) -> str:
    """Hash the arrays of a folder, in hexadecimal."""
    digest = hashlib.sha256()
    for name in names:
        with (Path(folder) / f"{name}.npy").open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
