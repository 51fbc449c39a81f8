"""A run directory that a real process refuses, and one that it takes."""

import json

import pytest

from ling_trainer.data.build import build_dataset

pytestmark = pytest.mark.slow


def test_a_run_goes_on_only_with_its_own_model_batch_and_data(launch, read_back, tmp_path):
    first = launch("run", {"steps": 5})
    assert first.wait() == [0], first.output()

    other_model = launch("run", {"steps": 9, "n_group": 1, "topk_group": 1})
    other_batch = launch("run", {"steps": 9, "global_batch_size": 8})
    for refused, problem in (
        (other_model, "model.n_group is 2 in the checkpoint and 1 now"),
        (other_batch, "data.global_batch_size is 4 in the checkpoint and 8 now"),
    ):
        assert refused.wait() == [4], refused.output()
        assert refused.message()["reason"] == "CheckpointUnusable"
        assert problem in refused.message()["message"]
        assert "checkpoint of step 5" in refused.message()["message"]

    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "another text " * 500}))
    build_dataset([tmp_path / "other.jsonl"], tmp_path / "other")
    other_data = launch("run", {"steps": 9, "dataset_path": str(tmp_path / "other")})
    assert other_data.wait() == [3], other_data.output()
    assert "these are not the data of the checkpoint" in other_data.message()["message"]

    # How it is computed may change; more steps are more samples, and the first keep their order.
    unrolled = launch("run", {"steps": 6, "scan_layers": False, "chunk_size": 8})
    assert unrolled.wait() == [0], unrolled.output()
    assert "restored the checkpoint of step 5" in unrolled.output()
    assert [line["step"] for line in read_back.journal(unrolled.run_directory)] == [*range(1, 7)]
