"""What a debug bundle must not hold."""

import json
from typing import Any

import pytest

from ling_operator.redaction import REDACTED, hide, redact


def variable(name: str, value: str) -> dict[str, str]:
    return {"name": name, "value": value}


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "db_password", "AWS_SECRET_ACCESS_KEY", "APIKEY", "BASIC_AUTH"],
)
def test_a_variable_whose_name_says_secret_is_hidden_everywhere(name: str) -> None:
    secret = "s3cr3t-value"
    pod = {"spec": {"containers": [{"env": [variable(name, secret), variable("HOME", "/root")]}]}}
    clean, secrets = redact(pod)
    env = clean["spec"]["containers"][0]["env"]
    assert env == [variable(name, REDACTED), variable("HOME", "/root")]
    assert hide(f"curl -H {secret}", secrets) == f"curl -H {REDACTED}"
    assert pod["spec"]["containers"][0]["env"][0]["value"] == secret, "a copy"


def test_the_copy_of_the_object_in_an_annotation_is_left_out() -> None:
    key = "kubectl.kubernetes.io/last-applied-configuration"
    applied = json.dumps({"env": [variable("HF_TOKEN", "hf_abcdef")]})
    item = {"metadata": {"annotations": {key: applied, "note": "x"}, "managedFields": [{}]}}
    assert redact(item)[0] == {"metadata": {"annotations": {"note": "x"}}}


def test_settings_are_hidden_by_whole_words_only() -> None:
    settings: dict[str, Any] = {
        "tokenizerPath": "gs://b/tokenizer.json",
        "total_tokens": 5,
        "keepN": "2",
        "wandbApiKey": "wandb-123456",
        "api_key": "abcdef-1",
        "hub": {"accessToken": "hub-token-1"},
    }
    clean, secrets = redact(settings)
    assert clean == {
        **settings,
        "wandbApiKey": REDACTED,
        "api_key": REDACTED,
        "hub": {"accessToken": REDACTED},
    }
    assert secrets == {"wandb-123456", "abcdef-1", "hub-token-1"}


def test_settings_inside_a_variable_and_arguments_are_looked_into() -> None:
    config = json.dumps({"steps": 3, "hub_token": "hub-token-1"})
    container = {
        "env": [variable("LING_RUN_CONFIG", config)],
        "args": ["--hub-token=hub-token-1", "steps=3", "api_key=abcdef-1"],
    }
    clean, _ = redact(container)
    assert json.loads(clean["env"][0]["value"]) == {"steps": 3, "hub_token": REDACTED}
    assert clean["args"] == [f"--hub-token={REDACTED}", "steps=3", f"api_key={REDACTED}"]


@pytest.mark.parametrize(
    ("arguments", "clean"),
    [
        (
            ["--hub-token", "hub-token-1", "--steps", "3"],
            ["--hub-token", REDACTED, "--steps", "3"],
        ),
        (["--token", "--steps"], ["--token", "--steps"]),
        (
            ["-c", "export HF_TOKEN=hub-token-1; python train.py --api-key 'ab cd ef' --steps 3"],
            ["-c", f"export HF_TOKEN={REDACTED}; python train.py --api-key {REDACTED} --steps 3"],
        ),
        (["-c", 'set -e; HF_TOKEN="$(cat /t)" run --tokenizer a'],) * 2,
        (["db=postgres://ann:s3cr3t-1@db/x"], [f"db=postgres://ann:{REDACTED}@db/x"]),
    ],
)
def test_secrets_of_a_command_line_are_hidden(arguments: list[str], clean: list[str]) -> None:
    assert redact({"args": arguments})[0]["args"] == clean
    _, secrets = redact({"command": arguments})
    assert not any(secret in hide(" ".join(arguments), secrets) for secret in secrets)


def test_a_password_in_an_address_is_hidden() -> None:
    clean, secrets = redact({"env": [variable("PROXY", "http://ann:s3cr3t-1@proxy:3128")]})
    assert clean["env"][0]["value"] == f"http://ann:{REDACTED}@proxy:3128"
    assert secrets == {"s3cr3t-1"}


def test_a_reference_to_a_secret_stays_and_short_values_are_not_hunted_for() -> None:
    source = {"secretKeyRef": {"name": "hf", "key": "token"}}
    clean, secrets = redact({"env": [{"name": "HF_TOKEN", "valueFrom": source}]})
    assert clean["env"][0]["valueFrom"] == source
    clean, secrets = redact({"env": [variable("DEBUG_KEY", "1")]})
    assert clean["env"][0]["value"] == REDACTED
    assert hide("step 1 of 10", secrets) == "step 1 of 10"
