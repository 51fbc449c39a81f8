"""The schema: precedence, names, and errors that say what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from ling_trainer import config
from ling_trainer.config import RunConfig
from ling_trainer.presets import PRESETS
from ling_trainer.schema import ConfigError, field_paths
from ling_trainer.settings import load_yaml, parse_overrides, resolve

BASE = {"preset": "ling2_tiny", "base_output_directory": "out", "dataset_path": "data/x"}


def _errors(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(BASE, parse_overrides(overrides))
    return str(caught.value)


def test_every_field_name_is_unique_across_sections() -> None:
    assert field_paths(RunConfig)["hidden_size"] == "model.hidden_size"


def test_an_override_beats_the_file_which_beats_the_preset() -> None:
    file = load_yaml("steps: 7\nmodel: {hidden_size: 64}\nlearning_rate: 1e-3\n", "run.yaml")
    config = resolve(BASE, file, parse_overrides(["steps=9"]))
    assert config.steps == 9
    assert config.model.hidden_size == 64
    assert config.optimizer.learning_rate == 1e-3
    assert config.model.num_experts == 16


@pytest.mark.parametrize(
    "text", ["loss.z_loss_multiplier=0.5", "z_loss_multiplier=0.5", "loss.zLossMultiplier=0.5"]
)
def test_a_field_is_set_nested_flat_or_in_camel_case(text: str) -> None:
    assert resolve(BASE, parse_overrides([text])).loss.z_loss_multiplier == 0.5


def test_model_name_is_an_alias_of_preset() -> None:
    rest = {key: value for key, value in BASE.items() if key != "preset"}
    assert resolve(rest, parse_overrides(["model_name=ling2"])).model.num_experts == 256


def test_the_camel_case_dump_is_read_back_equal() -> None:
    config = resolve(BASE)
    assert resolve(config.model_dump(mode="json", by_alias=True)) == config


def test_choosing_one_batch_size_drops_the_presets_other() -> None:
    data = resolve(BASE, parse_overrides(["per_device_batch_size=3"])).data
    assert (data.global_batch_size, data.per_device_batch_size) == (None, 3)


def test_setting_both_batch_sizes_is_refused() -> None:
    assert "set exactly one" in _errors("per_device_batch_size=3", "global_batch_size=4")


@pytest.mark.parametrize(
    ("override", "field", "value", "remedy"),
    [
        ("stepss=1", "stepss", "", "did you mean steps?"),
        ("model.hidden_sise=1", "model.hidden_sise", "", "did you mean model.hidden_size?"),
        ("steps=many", "steps", "'many'", "valid integer"),
        ("steps=2.5", "steps", "2.5", "valid integer"),
        ("steps=true", "steps", "True", "valid integer"),
        ("steps='7'", "steps", "'7'", "valid integer"),
        ("learning_rate=.nan", "optimizer.learning_rate", "nan", "finite"),
        ("gradient_accumulation_steps=3", "global_batch_size=4", "3", "choose a multiple"),
        ("loss_groups=3", "global_batch_size=4", "loss_groups=3", "choose a multiple"),
        ("n_group=3", "n_group=3", "num_experts=16", "choose a divisor"),
        ("topk_group=9", "topk_group=9", "n_group=4", "lower it"),
        ("moe_router_pre_softmax=true", "moe_router_pre_softmax", "true", "leave it out"),
        ("score_function=softmax", "routed_bias_update_rate", "0.001", "set it to 0"),
        ("num_experts_per_tok=9", "num_experts_per_tok=9", "topk_group=2", "lower"),
        ("group_norm_size=3", "group_norm_size=3", "128", "choose a divisor"),
        ("partial_rotary_factor=0.1", "partial_rotary_factor=0.1", "head_dim=32", "even"),
        ("eod_id=600", "eod_id=600", "vocab_size=512", "correct"),
        ("first_k_dense_replace=9", "first_k_dense_replace=9", "num_hidden_layers=4", "lower"),
        ("num_nextn_predict_layers=256", "num_nextn_predict_layers=256", "256", "lower"),
        ("base_output_directory=null", "base_output_directory", "", "enable_checkpointing=false"),
        ("dataset_path=null", "dataset_path", "", "prefix"),
        ("split=a", "data.split", "'a'", "pattern"),
        ("ici_data_parallelism=0", "ici_data_parallelism=0", "0", "-1 or a positive"),
        ("preset=ling3", "preset", "'ling3'", "ling2_tiny"),
        ("fault_kind=oops", "fault.fault_kind", "'oops'", "nan_loss"),
    ],
)
def test_a_bad_setting_is_named_with_value_rule_and_remedy(
    override: str, field: str, value: str, remedy: str
) -> None:
    message = _errors(override)
    assert field in message
    assert value in message
    assert remedy in message


def test_a_model_without_a_router_is_refused_a_checkpoint_and_runs_without() -> None:
    dense = ("first_k_dense_replace=4", "num_nextn_predict_layers=0")
    assert "model.first_k_dense_replace=4 leaves no layer with experts" in _errors(*dense)
    resolve(BASE, parse_overrides([*dense, "enable_checkpointing=false"]))


def test_every_bad_setting_is_told_at_once() -> None:
    assert len(_errors("steps=x", "nope=1", "n_group=3").splitlines()) == 3


def test_an_override_without_equals_sign_is_refused() -> None:
    assert "key=value" in _errors("steps")


def test_a_file_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml holds a list"):
        load_yaml("- 1", "run.yaml")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_is_a_valid_configuration(preset: str) -> None:
    config = resolve({**BASE, "preset": preset})
    assert config.loss.calculate_per_token_loss is False
    assert config.loss.mtp_per_layer_loss_norm is True


def test_the_configuration_is_hashable_and_frozen() -> None:
    config = resolve(BASE)
    assert hash(config) == hash(resolve(BASE))
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3  # type: ignore[misc]


def test_reading_a_configuration_imports_no_jax() -> None:
    code = (
        "import sys, ling_trainer.settings, ling_trainer.health_metrics\n"
        "bad = {'jax', 'flax', 'optax', 'numpy', 'orbax'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_table_of_megatrons_flags_in_the_docs_is_that_of_the_schema(repository: Path) -> None:
    def rows(text: str) -> set[tuple[str, ...]]:
        lines = (line.replace("`", "") for line in text.splitlines())
        cells = (line.strip("| ").split("|") for line in lines if line.startswith("| --"))
        return {tuple(cell.strip() for cell in row) for row in cells}

    documented = rows((repository / "docs" / "numerics.md").read_text())
    assert len(documented) > 30
    assert documented == rows(config.__doc__ or "")
