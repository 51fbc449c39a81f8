"""Two containers of the trainer's image train together; one is told to go."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lingcluster import sample_runs
from lingcluster.client import wait_for
from lingcluster.image_build import BuiltImage
from lingcluster.journal import journal, kept_checkpoints
from lingcluster.runc_container import RuncContainer, Start
from ports import free_ports

STEPS = 100_000  # never reached
FROM_STEP = 5


@pytest.mark.slow
def test_sigterm_to_one_of_two_checkpoints_the_last_logged_step_in_both(
    repository: Path,
    trainer_image: BuiltImage,
    start_container: Callable[[BuiltImage, Start], RuncContainer],
    run_container: Callable[..., str],
    shared_folder: Path,
) -> None:
    (shared_folder / "text.txt").write_text(Path(json.__file__).read_text() * 8)
    build = "python3 -m ling_trainer data build --input /shared/text.txt --output /shared/corpus"
    run_container(trainer_image, *build.split(), mounts={"/shared": shared_folder})
    run = sample_runs.small_real_run(
        repository / "manifests" / "ling2-run.yaml",
        "pair",
        dataset=Path("/shared/corpus"),
        output=Path("/shared/runs"),
        compilation_cache=Path("/shared/jax"),
        steps=STEPS,
    )
    run["spec"]["run"]["runName"] = "pair"
    run["spec"]["run"]["metrics"] = {"metricsPort": 0}  # the network is the machine's
    run["spec"]["run"]["checkpoint"]["checkpointPeriod"] = STEPS
    coordinator = f"127.0.0.1:{free_ports(1)[0]}"
    pair = [
        start_container(
            trainer_image,
            Start(
                environment={
                    "JAX_PLATFORMS": "cpu",
                    "JAX_COMPILATION_CACHE_DIR": "/shared/jax",
                    "LING_RUN": "pair",
                    "LING_RUN_CONFIG": json.dumps(run["spec"]["run"]),
                    "LING_COORDINATOR_ADDRESS": coordinator,
                    "LING_NUM_PROCESSES": "2",
                    "LING_PROCESS_ID": str(index),
                    "LING_CONTAINER_INDEX": str(index),
                    "LING_TERMINATION_LOG": f"/shared/message-{index}",
                },
                mounts={"/shared": shared_folder},
            ),
        )
        for index in range(2)
    ]
    directory = shared_folder / "runs" / "pair"

    def is_training() -> bool:
        ended = [each.output() for each in pair if each.returncode is not None]
        assert not ended, ended[0]
        return max(journal(directory), default=0) >= FROM_STEP

    wait_for("both to train", is_training, timeout=240, describe=lambda: pair[0].output())
    pair[1].signal(signal.SIGTERM)
    assert [each.wait(timeout=120) for each in pair] == [143, 143], pair[0].output()
    last = max(journal(directory))
    assert kept_checkpoints(directory) == [last]
    messages = [json.loads((shared_folder / f"message-{i}").read_text()) for i in range(2)]
    assert {message["step"] for message in messages} == {str(last)}
    print(f"both ended with 143 after the checkpoint of step {last}")
