"""Settings: sources and their order, and that nothing unknown passes."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from tinkercloud_api.settings import UnknownSettingError, load_settings


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TINKERCLOUD_"):
            monkeypatch.delenv(name)


def test_arguments_are_stronger_than_environment_than_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('port = 1\nhost = "a"\nlog_level = "debug"\n[limits]\nmax_lora_rank = 7\n')
    monkeypatch.setenv("TINKERCLOUD_CONFIG_FILE", str(file))
    monkeypatch.setenv("TINKERCLOUD_PORT", "2")
    monkeypatch.setenv("TINKERCLOUD_HOST", "b")

    settings = load_settings(port=3, host=None)

    assert (settings.port, settings.host, settings.log_level) == (3, "b", "debug")
    assert settings.limits.max_lora_rank == 7


def test_nested_settings_are_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_TIMINGS__LONG_POLL_SECONDS", "3")

    assert load_settings().timings.long_poll_seconds == 3


def test_an_unknown_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_PROT", "1")

    with pytest.raises(UnknownSettingError, match="TINKERCLOUD_PROT"):
        load_settings()


def test_an_unknown_nested_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_LIMITS__MAX_RANK", "1")

    with pytest.raises(ValidationError, match="max_rank"):
        load_settings()


def test_an_unknown_key_in_the_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("prot = 1\n")
    monkeypatch.setenv("TINKERCLOUD_CONFIG_FILE", str(file))

    with pytest.raises(ValidationError, match="prot"):
        load_settings()


def test_a_missing_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_CONFIG_FILE", "/nowhere.toml")

    with pytest.raises(FileNotFoundError, match=r"/nowhere\.toml"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [("PORT", "x"), ("PORT", "70000"), ("LOG_LEVEL", "loud"), ("BOOTSTRAP_KEY", "secret")],
)
def test_a_value_that_is_not_acceptable_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"TINKERCLOUD_{name}", value)

    with pytest.raises(ValidationError, match=name.lower()):
        load_settings()


@pytest.mark.parametrize(
    ("setting", "value"), [("process_group", "nccl"), ("shared_memory", "cuda")]
)
def test_a_head_that_does_not_train_on_a_gpu_sends_no_models_from_there(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: str
) -> None:
    monkeypatch.setenv("TINKERCLOUD_SAMPLER__BACKEND", "sglang")
    monkeypatch.setenv("TINKERCLOUD_SAMPLER__INFERENCE__URLS", '["http://engine:8000"]')
    monkeypatch.setenv(f"TINKERCLOUD_SAMPLER__INFERENCE__{setting.upper()}", value)
    with pytest.raises(ValidationError, match=f"{setting}: {value} wants .*device cpu"):
        load_settings()

    monkeypatch.setenv("TINKERCLOUD_TRAINER__DEVICE", "cuda")

    assert getattr(load_settings().sampler.inference, setting) == value


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_BOOTSTRAP_KEY", "tml-hush")
    monkeypatch.setenv("TINKERCLOUD_DATABASE_URL", "postgresql+asyncpg://u:hush@h/d")

    assert "hush" not in repr(load_settings())


def test_a_head_is_given_up_no_sooner_than_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_HEAD_START_SECONDS", "10")
    monkeypatch.setenv("TINKERCLOUD_TRAINER__START_TIMEOUT_SECONDS", "7200")

    assert load_settings().head_deadline_seconds == 10
    monkeypatch.setenv("TINKERCLOUD_TRAINER__RANKS", "2")
    assert load_settings().head_deadline_seconds == 7210


def test_ranks_have_some_time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_TRAINER__START_TIMEOUT_SECONDS", "0")

    with pytest.raises(ValidationError, match="start_timeout_seconds"):
        load_settings()
