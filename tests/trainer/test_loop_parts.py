"""The loop's small decisions: lines, faults, rows of a step, who is seen on a port."""

import socket

import pytest

from ling_trainer.config import FaultConfig, RunConfig
from ling_trainer.console import LINE_KEYS, step_line
from ling_trainer.distributed import seen_processes
from ling_trainer.faults import is_hit, poison_of
from ling_trainer.schema import ConfigError
from ling_trainer.settings import resolve
from ling_trainer.startup import build_program, rows_per_step
from ling_trainer.step import Poison

VALUES: dict[str, float] = dict(
    zip(LINE_KEYS, (5.013258, 4.9, 0.71, 3e-4, 0.5, 2048.0), strict=True)
)


def tiny(**settings: object) -> RunConfig:
    base = {"preset": "ling2_tiny", "dataset_type": "synthetic", "enable_checkpointing": False}
    return resolve(base | settings)


def test_the_line_of_a_step_keeps_its_keys_and_their_order():
    assert step_line(12, 200, VALUES) == (
        "step=12 target=200 loss=5.013258 lm_loss=4.900000 raw_grad_norm=0.71 "
        "learning_rate=0.0003 "
        "step_time_seconds=0.5 tokens_per_second=2048"
    )
    assert " loss=nan " in step_line(1, 2, VALUES | {"learning/loss": float("nan")})


def test_a_fault_hits_its_count_of_steps_and_none_while_it_is_off():
    fault = FaultConfig(enabled=True, fault_kind="nan_loss", fault_step=3, fault_count=2)
    assert [step for step in range(1, 8) if is_hit(fault, step)] == [3, 4]
    assert poison_of(fault, 4) == Poison.NAN_LOSS
    assert poison_of(fault, 5) == Poison.NONE
    assert not is_hit(FaultConfig(fault_step=3), 3)


def test_rows_per_device_are_of_one_micro_batch():
    own = {"per_device_batch_size": 2, "gradient_accumulation_steps": 3}
    assert rows_per_step(tiny(**own), 4) == 24
    assert rows_per_step(tiny(global_batch_size=6, gradient_accumulation_steps=3), 4) == 6


def test_rows_that_do_not_split_over_loss_groups_name_both_settings():
    config = tiny(per_device_batch_size=2, loss_groups=4)
    assert rows_per_step(config, 2) == 4
    with pytest.raises(ConfigError, match=r"data\.per_device_batch_size=2 x 1 .*loss_groups=4"):
        rows_per_step(config, 1)


def test_a_mesh_that_does_not_fit_the_devices_is_a_wrong_setting():
    with pytest.raises(ConfigError, match=r"mesh\.ici_tensor_parallelism=7"):
        build_program(tiny(ici_tensor_parallelism=7))


def test_connections_to_a_port_are_counted_once_each():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert seen_processes(port) == 0
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        accepted = [server.accept()[0] for _ in clients]
        assert seen_processes(port) == 3
        for connection in [*clients, *accepted]:
            connection.close()
