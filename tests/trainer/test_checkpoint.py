"""Checkpoints of a small state: what is kept, what is refused, and in which words."""

import gc
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from ling_trainer.checkpoint import (
    Checkpoints,
    Retention,
    check_identity,
    committed_steps,
    newest_checkpoint,
    read_record,
)
from ling_trainer.checkpoint_failure import failure
from ling_trainer.checksum import leaf_checksums, leaf_names
from ling_trainer.config import CheckpointConfig
from ling_trainer.data.order import SampleOrder
from ling_trainer.ends import EndRun, ExitCode
from ling_trainer.optimizer import make_optimizer
from ling_trainer.optimizer_config import OptimizerConfig
from ling_trainer.run_record import RunRecord
from ling_trainer.step import TrainState, init_state

# Where one read of a restore fails, Orbax closes its event loop under the others: what they then
# raise has no caller. Which test sees it depends on the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
CONFIG = CheckpointConfig(max_num_checkpoints_to_keep=2, protect_steps=3)


def state_of(seed: int, width: int = 6) -> TrainState:
    """Make a state with lists, stacked leaves, optimizer moments and a scalar."""
    random = np.random.default_rng(seed)
    params = {
        "embedding": jnp.asarray(random.normal(size=(8, width)), jnp.float32),
        "groups": [{"down": jnp.asarray(random.normal(size=(2, width, 4)), jnp.float32)}],
        "tail": [],
    }
    return init_state(params, jnp.ones((1, 4)), make_optimizer(OPTIMIZER))


def like(state: TrainState) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def record(attempt: int = 1) -> RunRecord:
    return RunRecord(
        attempt=attempt, sample_order=SampleOrder((40,)), identity={"model.hidden_size": 6}
    )


@pytest.fixture
def directory(tmp_path: Path) -> epath.Path:
    return epath.Path(tmp_path / "checkpoints")


@pytest.fixture
def saved(directory) -> SimpleNamespace:
    """One checkpoint, of step 4."""
    state = state_of(0)
    checkpoints = Checkpoints(directory, CONFIG)
    checkpoints.save(4, state, record())
    checkpoints.wait()
    return SimpleNamespace(state=state, folder=directory / "4", directory=directory)


def refused(saved: SimpleNamespace, wanted: Any) -> str:
    """Restore in vain, with a fresh manager as a new process has, and return the message."""
    with pytest.raises(EndRun) as error:
        Checkpoints(saved.directory, CONFIG).restore(4, wanted)
    assert error.value.ending.code == ExitCode.CHECKPOINT
    time.sleep(0.1)  # the abandoned reads end in this test, and not in the next module's
    gc.collect()
    message = error.value.ending.message
    assert str(saved.folder) in message
    assert "step 4" in message
    return message


def test_what_is_restored_is_what_was_saved_to_the_bit(saved):
    restored = Checkpoints(saved.directory, CONFIG).restore(4, like(saved.state))
    assert jax.tree.structure(restored) == jax.tree.structure(saved.state)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(saved.state), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_a_state_may_be_donated_as_soon_as_save_returns(directory):
    before, state = state_of(0), state_of(0)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    checkpoints = Checkpoints(directory, CONFIG)
    checkpoints.save(1, state, record())
    for _ in range(5):
        state = overwrite(state)
    jax.block_until_ready(state)
    checkpoints.wait()
    restored = checkpoints.restore(1, like(before))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), restored, before))


def test_the_newest_committed_step_is_never_one_that_is_still_being_saved(directory):
    checkpoints = Checkpoints(directory, CONFIG)
    assert checkpoints.newest_committed == 0
    checkpoints.save(1, state_of(0, width=400_000), record())
    if checkpoints.newest_committed == 1:
        assert committed_steps(directory) == [1]
    checkpoints.wait()
    assert checkpoints.newest_committed == 1


def test_another_shape_is_refused_with_the_leafs_name_and_both_shapes(saved):
    message = refused(saved, like(state_of(0, width=7)))
    assert "leaf params.embedding is float32[8, 6] there and float32[8, 7]" in message


def test_a_missing_leaf_is_refused_by_its_name(saved):
    wanted = like(saved.state)
    wanted.params["tail"].append({"scale": jax.ShapeDtypeStruct((6,), jnp.float32)})
    assert "leaf params.tail.0.scale is missing there" in refused(saved, wanted)


def test_another_type_is_refused_rather_than_converted(saved):
    wanted = like(saved.state)
    leaf = wanted.params["embedding"]
    wanted.params["embedding"] = jax.ShapeDtypeStruct(
        leaf.shape, jnp.bfloat16, sharding=leaf.sharding
    )
    assert "params.embedding is float32[8, 6] there and bfloat16[8, 6]" in refused(saved, wanted)


@pytest.fixture
def big(directory) -> SimpleNamespace:
    """A checkpoint whose largest data file holds the values of a leaf."""
    state = state_of(0, width=300)
    checkpoints = Checkpoints(directory, CONFIG)
    checkpoints.save(4, state, record())
    checkpoints.wait()
    files = (Path(directory) / "4" / "state").glob("**/d/*")
    largest = max(files, key=lambda path: path.stat().st_size)
    return SimpleNamespace(
        state=state, folder=directory / "4", directory=directory, largest=largest
    )


def test_a_flipped_bit_is_found_though_the_storage_does_not_notice(big):
    raw = bytearray(big.largest.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    big.largest.write_bytes(raw)
    assert "leaf " in refused(big, like(big.state))


def test_a_truncated_array_is_refused_by_its_name(big):
    big.largest.write_bytes(big.largest.read_bytes()[:100])
    assert "leaf " in refused(big, like(big.state))


def test_a_missing_array_file_is_refused(big):
    big.largest.unlink()
    assert "delete that checkpoint's directory to restore an older one" in refused(
        big, like(big.state)
    )


def test_a_damaged_run_record_is_refused(saved):
    path = saved.folder / "run" / "metadata"
    content = json.loads(path.read_text())
    del content["sample_order"]
    path.write_text(json.dumps(content))
    assert "run record is damaged" in refused(saved, like(saved.state))


def test_another_model_is_refused_by_field(saved):
    with pytest.raises(EndRun, match=r"model\.hidden_size is 6 in the checkpoint and 8") as error:
        check_identity(
            saved.directory,
            4,
            ours={"model.hidden_size": 8},
            theirs=read_record(saved.directory, 4).identity,
        )
    assert error.value.ending.code == ExitCode.CHECKPOINT


def test_a_directory_that_cannot_be_written_is_final(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EndRun) as error:
        Checkpoints(epath.Path(tmp_path / "file" / "checkpoints"), CONFIG)
    assert error.value.ending.code == ExitCode.CHECKPOINT


def test_storage_that_fails_for_now_asks_for_a_restart(saved, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(saved.directory, CONFIG)
    monkeypatch.setattr(checkpoints._manager, "save", full)
    with pytest.raises(EndRun, match="No space left") as error:
        checkpoints.save(5, saved.state, record())
    assert error.value.ending.code == ExitCode.RESTART


def test_an_interrupted_save_is_cleaned_up_and_its_step_can_be_saved_again(saved):
    (saved.directory / "5.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    assert newest_checkpoint(saved.directory, before=None, attempt=1) == 4
    checkpoints = Checkpoints(saved.directory, CONFIG)
    checkpoints.save(5, saved.state, record())
    checkpoints.wait()
    assert committed_steps(saved.directory) == [4, 5]


def test_the_checkpoint_before_a_bad_step_is_chosen_unless_this_attempt_saved_a_later_one(
    directory,
):
    checkpoints = Checkpoints(directory, CheckpointConfig(max_num_checkpoints_to_keep=9))
    for step, attempt in ((2, 1), (4, 1), (6, 1)):
        checkpoints.save(step, state_of(step), record(attempt))
    checkpoints.wait()
    assert newest_checkpoint(directory, before=None, attempt=2) == 6
    assert newest_checkpoint(directory, before=6, attempt=2) == 4
    assert newest_checkpoint(directory, before=2, attempt=2) is None
    assert checkpoints.discard_after(4) == [6]
    assert checkpoints.newest_committed == 4
    checkpoints.save(6, state_of(6), record(attempt=2))
    checkpoints.wait()
    assert newest_checkpoint(directory, before=6, attempt=2) == 6
    assert newest_checkpoint(directory, before=6, attempt=3) == 4


@given(
    st.integers(1, 4), st.integers(0, 60), st.lists(st.integers(1, 25), min_size=1, max_size=40)
)
def test_there_is_always_a_checkpoint_old_enough_once_the_run_is(keep, protect, gaps):
    """Whatever the periods: the newest stay, an old one stays, and no more than two besides."""
    retention = Retention(keep, protect)
    kept: set[int] = set()
    step = 0
    saved: list[int] = []
    for gap in gaps:
        step += gap
        saved.append(step)
        kept = retention.kept({*kept, step})
        assert set(saved[-keep:]) <= kept
        assert len(kept) <= keep + 2
        old = [s for s in kept if s <= step - protect]
        if any(s <= step - protect for s in saved):
            assert old
            assert step - max(old) <= 2 * protect + 2 * max(gaps)


def test_checksums_show_each_single_change_and_a_swap():
    tree = {"a": jnp.arange(12, dtype=jnp.float32).reshape(3, 4), "b": jnp.int32(3)}
    assert leaf_names(tree) == ("a", "b")
    reference = np.asarray(leaf_checksums(tree))
    for row in range(3):
        for column in range(4):
            bits = np.asarray(tree["a"]).view(np.uint32).copy()
            bits[row, column] ^= 1 << 7
            changed = np.asarray(leaf_checksums({"a": bits.view(np.float32), "b": tree["b"]}))
            assert changed[0] != reference[0]
            assert changed[1] == reference[1]
    swapped = tree["a"][jnp.array([1, 0, 2])]
    assert int(leaf_checksums({"a": swapped})[0]) != int(reference[0])


def test_the_checksum_is_the_sum_that_the_docstring_says():
    values = np.random.default_rng(0).normal(size=(3, 5, 2)).astype(np.float32)
    bits = values.view(np.uint32).ravel().astype(np.uint64)
    expected = int((bits * (2 * np.arange(bits.size, dtype=np.uint64) + 1)).sum() % (1 << 32))
    assert int(leaf_checksums([jnp.asarray(values)])[0]) == expected


@pytest.mark.parametrize(
    ("processes", "cause", "code"),
    [
        (2, jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed"), ExitCode.RESTART),
        (2, ValueError("[gloo] Connection closed by peer [127.0.0.1]:1"), ExitCode.RESTART),
        (2, ValueError("DATA_LOSS: CRC mismatch"), ExitCode.CHECKPOINT),
        (1, jax.errors.JaxRuntimeError("INTERNAL: no such buffer"), ExitCode.CHECKPOINT),
    ],
)
def test_a_peer_that_dies_during_a_save_is_a_restart_and_no_damaged_checkpoint(
    processes: int, cause: Exception, code: ExitCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    passed_on = RuntimeError("the save did not finish")
    passed_on.__cause__ = cause
    for error in (cause, passed_on):
        ending = failure(error, "checkpoint of step 20").ending
        assert ending.code == code
        assert ending.reason == ("LostPeer" if code == ExitCode.RESTART else "CheckpointUnusable")
