"""Where a run's tokens come from and how they become batches. No JAX."""

from typing import Annotated, Literal, Self, cast

from pydantic import BeforeValidator, Field, model_validator

from ling_trainer.schema import Count, NonNegative, PositiveInt, Schema, require


def _from_list(value: object) -> object:
    """Take a YAML list for the tuple that a frozen configuration needs."""
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


type RampUpSetting = Annotated[
    tuple[PositiveInt, ...], Field(min_length=3, max_length=3), BeforeValidator(_from_list)
]


class DataConfig(Schema):
    """Where tokens come from and how they become batches."""

    dataset_type: Literal["mmap", "mmap_npy", "synthetic"] = "mmap"
    """mmap: Megatron .bin/.idx files; mmap_npy: with ready-made sample indices beside them;
    synthetic: random tokens from the seed, for dry runs."""
    dataset_path: str | None = None
    """Path of the .bin and .idx files without their endings. A blend is written
    path,weight;path,weight, or path;path to take each as long as it is; with mmap_npy each path
    is npy_dir|path, npy_dir holding {document,sample,shuffle}_index.npy."""
    train_data_path: str | None = None
    """Training data, as dataset_path, where the splits have data of their own; split is then
    not used."""
    valid_data_path: str | None = None
    """Validation data, as train_data_path."""
    test_data_path: str | None = None
    """Test data, as train_data_path."""
    split: Annotated[str, Field(pattern=r"^[0-9.]+(,[0-9.]+){0,2}$")] = "999,1,0"
    """Shares of train, validation and test documents, as Megatron's --split."""
    data_shuffle_seed: Count = 42
    max_target_length: Annotated[int, Field(ge=2)]
    """Tokens a sequence."""
    global_batch_size: PositiveInt | None = None
    """Sequences an optimizer step, over all micro-batches. This or per_device_batch_size."""
    per_device_batch_size: PositiveInt | None = None
    """Sequences a device in one micro-batch. This or global_batch_size."""
    rampup_batch_size: RampUpSetting | None = None
    """Start, increment, samples: begin with batches of `start` sequences and add `increment` at a
    time, up to global_batch_size after `samples` sequences. A smaller batch has fewer
    micro-batches of the same size. Schedules count sequences then, in units of global_batch_size,
    so warm-up and decay take more steps."""
    eod_id: Count
    """End-of-document token."""
    pad_id: Count
    """Padding token. Equal to eod_id, no label is masked as padding (Ling2)."""
    eod_mask_loss: bool = False
    """Give no loss to positions whose input is eod_id."""
    reset_attention_mask: bool = False
    """Keep attention inside a document; false lets documents of a sequence see each other."""
    reset_position_ids: bool = False
    """Restart positions after each eod_id."""
    inter_document_masking: bool = False
    """Keep attention inside a document and restart positions, documents being those of the .idx
    instead of what lies between eod_id tokens."""
    add_extra_token_to_sequence: bool = True
    """Cut samples of max_target_length + 1 tokens. False leaves the last target out."""
    drop_last_partial_validation_sequence: bool = True
    """False keeps a last validation sample that is too short, padded."""
    mid_level_dataset_surplus: NonNegative = 0.005
    """Share of samples that a weighted blend asks each of its datasets for beyond its turns."""
    allow_ambiguous_pad_tokens: bool = False
    """Mask pad_id as padding even if it is eod_id, as Megatron did before 0.16: no end of document
    is then learned."""
    reproduce_cached_loss_mask: bool = False
    """Take the loss from every position that is padding in the first sample of its dataset, as a
    fault of Megatron does where eod_mask_loss and both resets are off. For comparisons."""
    blend_cache_dir: str | None = None
    """Folder where indices are kept for the next start, by content and settings, and the .idx of
    remote data; null builds indices anew each time."""
    blend_index_dir: str | None = None
    """With mmap_npy: folder of a blend's ready-made dataset_index.npy and
    dataset_sample_index.npy; null makes them from the weights."""
    storage_timeout: PositiveInt = 120
    """Seconds after which a read of gs:// data is given up, retries included."""
    prefetch: PositiveInt = 2
    """Global batches read ahead of the step."""
    grain_worker_count: Count = 0
    """Processes that read ahead, each of them seconds in starting; 0 reads in threads of the
    training process."""
    grain_num_threads: PositiveInt = 2
    """Threads that read samples, in each process that reads; more of them hide the latency of
    remote storage."""

    @property
    def attention_resets(self) -> bool:
        """Whether attention stays inside a document."""
        return self.reset_attention_mask or self.inter_document_masking

    def split_path(self, name: Literal["train", "valid", "test"]) -> str | None:
        """Return the data path that a split has of its own."""
        paths = {
            "train": self.train_data_path,
            "valid": self.valid_data_path,
            "test": self.test_data_path,
        }
        return paths[name]

    @model_validator(mode="after")
    def _check(self) -> Self:
        own_paths = (self.train_data_path, self.valid_data_path, self.test_data_path)
        has_own = any(path is not None for path in own_paths)
        require((
            (
                (self.global_batch_size is None) != (self.per_device_batch_size is None),
                f"global_batch_size={self.global_batch_size} and per_device_batch_size="
                f"{self.per_device_batch_size}: set exactly one",
            ),
            (
                self.rampup_batch_size is None or self.global_batch_size is not None,
                f"rampup_batch_size={self.rampup_batch_size} needs global_batch_size, the size it "
                "ends at; set it in place of per_device_batch_size",
            ),
            (
                self.dataset_type == "synthetic" or has_own or self.dataset_path is not None,
                f"dataset_path is not set; dataset_type={self.dataset_type} needs the prefix of a "
                ".bin/.idx pair",
            ),
            (
                not (self.blend_cache_dir or "").startswith("gs://"),
                f"blend_cache_dir={self.blend_cache_dir} is not a local folder; name one",
            ),
            (
                self.blend_index_dir is None or self.dataset_type == "mmap_npy",
                f"blend_index_dir={self.blend_index_dir} needs dataset_type=mmap_npy; set it, or "
                "use blend_cache_dir",
            ),
            (
                not (has_own and self.dataset_path is not None),
                "dataset_path is set and so is a path of one split; name the data once",
            ),
        ))  # fmt: skip
        return self
