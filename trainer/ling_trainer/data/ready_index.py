"""Indices that were made beforehand, as .npy files: the mmap_npy layout.

A dataset's folder holds document_index.npy, sample_index.npy and shuffle_index.npy, a blend's
dataset_index.npy and dataset_sample_index.npy; arrays as Megatron's own index files. An entry of
the index cache is such a folder too. Checked here against what the arrays mean, not against
the tools of others that write them.
"""

from pathlib import Path

import numpy as np

from ling_trainer.data.blend import BlendIndex
from ling_trainer.data.gpt import GPTIndex
from ling_trainer.data.index_cache import load_arrays
from ling_trainer.data.index_file import DataError, IndexFile

GPT_ARRAYS = ("document_index", "sample_index", "shuffle_index")
BLEND_ARRAYS = ("dataset_index", "dataset_sample_index")


def load_gpt_index(folder: str, index: IndexFile, *, sequence_length: int) -> GPTIndex:
    """Map a dataset's indices and check that they belong to it and to the sequence length.

    Args:
      folder: holds the three arrays.
      index: of the dataset.
      sequence_length: tokens between the starts of two samples.

    Raises:
      DataError: a file is missing, or the arrays do not fit each other or the dataset.
    """
    arrays = load_arrays(Path(folder), GPT_ARRAYS)
    documents, samples, shuffle = (arrays[name] for name in GPT_ARRAYS)
    if documents.ndim != 1 or samples.ndim != 2 or samples.shape[1:] != (2,) or shuffle.ndim != 1:
        shapes = ", ".join(f"{name} {arrays[name].shape}" for name in GPT_ARRAYS)
        raise DataError(f"{folder}: the shapes must be [n], [samples + 1, 2], [samples]: {shapes}")
    if len(shuffle) != len(samples) - 1 or not len(shuffle) or shuffle.max() >= len(shuffle):
        raise DataError(
            f"{folder}/shuffle_index.npy: {len(shuffle)} samples for the {len(samples) - 1} of "
            "sample_index.npy; they are of different builds, make all three again"
        )
    if not len(documents) or documents.min() < 0 or documents.max() >= len(index.lengths):
        raise DataError(
            f"{folder}/document_index.npy: names documents that are not among the "
            f"{len(index.lengths)} of {index.path}; the folder is of another dataset"
        )
    _check_samples(folder, index, documents, samples, sequence_length)
    epochs = int(np.bincount(documents).max())
    return GPTIndex(documents, samples, shuffle, epochs)


def _check_samples(
    folder: str,
    index: IndexFile,
    documents: np.ndarray,
    samples: np.ndarray,
    sequence_length: int,
) -> None:
    """Check that sample k starts where k x sequence_length tokens have been read."""
    path = f"{folder}/sample_index.npy"
    position, offset = samples[:, 0].astype(np.int64), samples[:, 1].astype(np.int64)
    if position.min() < 0 or position.max() >= len(documents):
        raise DataError(f"{path}: points outside of document_index.npy; make all three again")
    lengths = index.lengths[documents]
    used = np.cumsum(lengths, dtype=np.int64)[position] - lengths[position] + offset
    wrong = used != np.arange(len(samples)) * sequence_length
    wrong[-1] &= not _ends_short(used, sequence_length)
    if wrong.any():
        k = int(wrong.argmax())
        raise DataError(
            f"{path}: sample {k} starts after {used[k]} tokens and should after "
            f"{k * sequence_length}; the folder is of another dataset or another "
            f"data.max_target_length than {sequence_length}"
        )


def _ends_short(used: np.ndarray, sequence_length: int) -> bool:
    """Tell whether only the last sample is shorter than the others (a validation split's)."""
    last = len(used) - 1
    return bool((last - 1) * sequence_length < used[-1] < last * sequence_length)


def load_blend_index(folder: str, num_datasets: int) -> BlendIndex:
    """Map a blend's turns and check that each dataset's samples are numbered from 0.

    Raises:
      DataError: a file is missing, or the turns are of another blend.
    """
    arrays = load_arrays(Path(folder), BLEND_ARRAYS)
    turns, numbers = (arrays[name] for name in BLEND_ARRAYS)
    if turns.ndim != 1 or turns.shape != numbers.shape or not len(turns):
        raise DataError(
            f"{folder}: dataset_index.npy {turns.shape} and dataset_sample_index.npy "
            f"{numbers.shape} must be of one shape [samples]"
        )
    if turns.min() < 0 or turns.max() >= num_datasets:
        raise DataError(
            f"{folder}/dataset_index.npy: has datasets {turns.min()} to {turns.max()} and the "
            f"data path names {num_datasets}; name the datasets it was made for, in that order"
        )
    for dataset in range(num_datasets):
        mine = numbers[turns == dataset]
        if not np.array_equal(mine, np.arange(len(mine))):
            raise DataError(
                f"{folder}/dataset_sample_index.npy: the samples of dataset {dataset} are not "
                "0, 1, 2 ...; make both files again"
            )
    return BlendIndex(turns, numbers)
