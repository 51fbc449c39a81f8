"""Exit codes and the message that is left for the operator."""

import json

from ling_trainer.ends import Ending, ExitCode, write_termination_message


def test_exit_codes_are_the_ones_the_jobsets_rules_name():
    assert {code.name: int(code) for code in ExitCode} == {
        "FINISHED": 0,
        "CONFIGURATION": 2,
        "DATA": 3,
        "CHECKPOINT": 4,
        "METRICS_PORT": 5,
        "RESTART": 42,
        "DIVERGED": 90,
        "STOPPED": 143,
    }


def test_the_message_is_a_json_object_of_strings_that_the_kubelet_does_not_cut(tmp_path):
    ending = Ending(
        code=90, reason="NonFiniteLoss", message='"quoted"\n\u00e9' * 2000, step=7, value="nan"
    )
    path = tmp_path / "message"
    write_termination_message(ending, process=3, path=path)
    raw = path.read_bytes()
    assert len(raw) <= 4096
    message = json.loads(raw)
    assert all(isinstance(value, str) for value in message.values())
    assert (message["reason"], message["step"], message["process"]) == ("NonFiniteLoss", "7", "3")


def test_a_message_that_cannot_be_written_does_not_change_how_the_run_ends(tmp_path):
    ending = Ending(code=0, reason="Finished", message="")
    write_termination_message(ending, process=0, path=tmp_path / "no-such-folder" / "message")
