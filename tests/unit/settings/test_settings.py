"""Settings: sources and their order, and that nothing unknown passes."""

import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinkercloud_api.cli import app
from tinkercloud_api.settings import InvalidSettingsError, load_settings
from tinkercloud_protocol.launch import Limits


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

    with pytest.raises(InvalidSettingsError, match="TINKERCLOUD_PROT"):
        load_settings()


def test_an_unknown_nested_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_LIMITS__MAX_RANK", "1")

    with pytest.raises(
        InvalidSettingsError, match="variable TINKERCLOUD_LIMITS__MAX_RANK is not a"
    ):
        load_settings()


def test_an_unknown_key_in_the_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("prot = 1\n")
    monkeypatch.setenv("TINKERCLOUD_CONFIG_FILE", str(file))

    with pytest.raises(InvalidSettingsError, match=rf"prot in {file} is not a setting; .*docs/"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("missing.toml", None, "No such file"),
        ("", None, "Is a directory"),
        ("wrong.toml", b"port = = 3", "is no TOML .*line 1"),
        ("binary.toml", b"\xff\xfe", "is no TOML .*utf-8"),
    ],
)
def test_a_file_that_can_not_be_read_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, content: bytes | None, told: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("TINKERCLOUD_CONFIG_FILE", str(file))

    with pytest.raises(InvalidSettingsError, match=f"CONFIG_FILE names {file}, which .*{told}"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [("PORT", "x"), ("PORT", "70000"), ("LOG_LEVEL", "loud"), ("BOOTSTRAP_KEY", "secret")],
)
def test_a_value_that_is_not_acceptable_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"TINKERCLOUD_{name}", value)

    with pytest.raises(InvalidSettingsError, match=f"TINKERCLOUD_{name}|bootstrap_key"):
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
    with pytest.raises(InvalidSettingsError, match=f"{setting}: {value} wants .*device cpu"):
        load_settings()

    monkeypatch.setenv("TINKERCLOUD_TRAINER__DEVICE", "cuda")

    assert getattr(load_settings().sampler.inference, setting) == value


def on_kubernetes(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Set what the chart does, and more."""
    chosen = {"PROVIDER": "kubernetes", "CHECKPOINT_ROOT": "s3://checkpoints/x", **variables}
    for name, value in chosen.items():
        monkeypatch.setenv(f"TINKERCLOUD_{name}", value)


def refusal(*arguments: str) -> str:
    """Return what the command says of settings that it does not take, on one line."""
    result = CliRunner().invoke(app, ["keys", "list", *arguments])
    assert result.exit_code == 1
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("MODELS", '{"a": "b"}', "models: .*the BaseModels of its namespace"),
        ("PRELOAD", "false", "preload: .*when clients ask for them"),
        ("ORPHAN_GRACE_SECONDS", "9", "orphan_grace_seconds: .*outlive every server"),
        ("HEAD_START_SECONDS", "9", "head_start_seconds: .*trainer.startTimeoutSeconds"),
        ("TRAINER__DTYPE", "bfloat16", "trainer.dtype: .*set `trainer` of the BaseModel"),
        ("SAMPLER__MAX_QUEUED_REQUESTS", "9", "sampler.max_queued_requests: .*set `sampler` of"),
        ("LIMITS__MAX_LORA_RANK", "64", "limits.max_lora_rank: .*set `limits.maxLoraRank` of the"),
        ("LIMITS__MAX_CONTEXT_LENGTH", "9", "max_context_length: .*set `maxContextLength` of the"),
        ("LIMITS__MAX_SNAPSHOT_BYTES", "9", "max_snapshot_bytes: .*head.resources.scratch"),
        (
            "LIMITS__MAX_RESULT_BYTES",
            "9",
            "limits.max_result_bytes: .*heads there have its default",
        ),
        ("TIMINGS__DRAIN_SECONDS", "9", "timings.drain_seconds: .*sessions.drainSeconds"),
        ("TIMINGS__SUSPEND_SECONDS", "9", "timings.suspend_seconds: .*sessions.suspendSeconds"),
        ("TIMINGS__GAP_SECONDS", "9", "timings.gap_seconds: .*heads there have its default"),
    ],
)
def test_what_heads_are_told_elsewhere_on_kubernetes_is_refused_with_where(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    on_kubernetes(monkeypatch, **{name: value})

    with pytest.raises(InvalidSettingsError, match=told):
        load_settings()

    monkeypatch.setenv("TINKERCLOUD_PROVIDER", "local")
    load_settings()


def test_what_the_server_itself_uses_is_taken_on_kubernetes_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_kubernetes(
        monkeypatch,
        TIMINGS__LONG_POLL_SECONDS="3",
        LIMITS__MAX_BODY_BYTES="1000",
        HF_MIRROR="false",
    )

    settings = load_settings()

    assert settings.timings.long_poll_seconds == 3
    assert settings.limits.max_body_bytes == 1000


def test_no_body_is_taken_that_heads_of_kubernetes_would_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest = Limits().max_body_bytes
    on_kubernetes(monkeypatch, LIMITS__MAX_BODY_BYTES=str(largest + 1))

    with pytest.raises(
        InvalidSettingsError, match=f"limits.max_body_bytes: is {largest + 1}, .*{largest}"
    ):
        load_settings()

    monkeypatch.setenv("TINKERCLOUD_LIMITS__MAX_BODY_BYTES", str(largest))
    load_settings()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+asyncpg://u:p@host/tinkercloud",
        "postgresql+asyncpg://u:p@host:6432/tinkercloud?ssl=require&prepared_statement_cache_size=0",
        "sqlite+aiosqlite:////var/lib/catalog.db",
    ],
)
def test_a_catalog_is_named_by_the_drivers_that_are_there(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("TINKERCLOUD_DATABASE_URL", url)

    assert load_settings().catalog_url == url


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://u:hush@host/d", r"postgresql://, and postgresql\+asyncpg:// and sqlite"),
        ("postgres://u:hush@host/d", r"begins with postgres://, and postgresql\+asyncpg://"),
        ("sqlite:///catalog.db", r"begins with sqlite://, .*sqlite\+aiosqlite:// are accepted"),
        ("postgresql+asyncpg://u:hush@h/d?sslmode=require", "write ssl=require in its place"),
        (
            "postgresql+asyncpg://u:hush@h/d?ssl=verify-full&sslrootcert=/ca.pem",
            "sslrootcert; set PGSSLROOTCERT in the environment in its place",
        ),
        (
            "postgresql+asyncpg://u:hush@h/d?channel_binding=require",
            "channel_binding; leave it out",
        ),
        ("postgresql+asyncpg://u@host:hush/d", r"no URL; write postgresql\+asyncpg://USER"),
        ("hush", r"is no URL; write postgresql\+asyncpg://USER"),
    ],
)
def test_a_catalog_that_no_driver_opens_is_refused_with_what_to_write_and_no_password(
    monkeypatch: pytest.MonkeyPatch, url: str, told: str
) -> None:
    monkeypatch.setenv("TINKERCLOUD_DATABASE_URL", url)

    message = refusal()

    assert message.startswith("error: settings: database_url: ")
    assert re.search(told, message)
    assert "hush" not in message


def test_a_missing_driver_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    monkeypatch.setenv("TINKERCLOUD_DATABASE_URL", "postgresql+asyncpg://u:p@h/d")

    assert "pip install 'tinkercloud-api[postgres]'" in refusal()


def test_a_fault_of_several_settings_is_told_in_its_own_words_and_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKERCLOUD_PROVIDER", "kubernetes")
    monkeypatch.setenv("TINKERCLOUD_BOOTSTRAP_KEY", "tml-hush-this-is-the-secret-key")

    message = refusal()

    assert message.startswith("error: settings: checkpoint_root: required with provider=kubernetes")
    assert "hush" not in message


@pytest.mark.parametrize("weak", ["x", "random-8fK2q", "abab" * 16])
def test_a_key_that_can_be_guessed_is_refused_with_what_to_write_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, weak: str
) -> None:
    monkeypatch.setenv("TINKERCLOUD_BOOTSTRAP_KEY", f"tml-{weak}")

    message = refusal()

    assert message.startswith(f"error: settings: bootstrap_key: has {len(weak)} characters behind")
    assert "`echo tml-$(openssl rand -hex 32)`" in message
    assert f"tml-{weak}" not in message


def test_a_key_that_is_none_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_BOOTSTRAP_KEY", "hush")

    assert refusal() == (
        "error: settings: bootstrap_key: must begin with 'tml-': the SDK refuses other keys"
    )


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("MODELS", '{"Qwen/Qwen3-0.6B": "/models/qwen3-0.6b"}'),
        ("SAMPLER__INFERENCE__URLS", '["http://127.0.0.1:30000"]'),
        ("TRAINER", '{"backend": "torch"}'),
        ("SAMPLER__INFERENCE", '{"kind": "sglang"}'),
    ],
)
def test_a_list_or_table_that_is_not_json_is_told_what_to_write(
    monkeypatch: pytest.MonkeyPatch, name: str, example: str
) -> None:
    monkeypatch.setenv(f"TINKERCLOUD_{name}", "foo")

    with pytest.raises(InvalidSettingsError) as refused:
        load_settings()

    assert str(refused.value) == (
        f"TINKERCLOUD_{name} is not JSON, as lists and tables are in variables; write for example"
        f" TINKERCLOUD_{name}='{example}'"
    )
    monkeypatch.setenv(f"TINKERCLOUD_{name}", example)
    if name != "SAMPLER__INFERENCE__URLS":
        load_settings()


def test_a_fault_of_a_table_names_the_setting_as_where_the_others_are_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = "backend megatron trains at ranks; set it to 1 or more"
    (tmp_path / "settings.toml").write_text('[trainer]\nbackend = "megatron"\n')

    monkeypatch.setenv("TINKERCLOUD_CONFIG_FILE", str(tmp_path / "settings.toml"))
    assert refusal() == f"error: settings: trainer.ranks: {told}"
    monkeypatch.setenv("TINKERCLOUD_TRAINER__BACKEND", "megatron")
    assert refusal() == f"error: settings: TINKERCLOUD_TRAINER__RANKS: {told}"


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_BOOTSTRAP_KEY", "tml-hush-this-is-the-secret-key")
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

    with pytest.raises(InvalidSettingsError, match="TINKERCLOUD_TRAINER__START_TIMEOUT_SECONDS"):
        load_settings()


def findings(*arguments: str) -> dict[str, dict[str, str]]:
    """Return what the doctor finds wrong, by what it looked at."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    assert result.exit_code == 1
    return {row["check"]: row for row in json.loads(result.stdout) if row["result"] == "FAILED"}


@pytest.mark.parametrize("folder", ["/proc/nope", "/etc/hostname"])
def test_a_state_folder_that_can_not_be_used_is_told_in_a_sentence(folder: str) -> None:
    told = f"state_dir: {folder} can't be used ("

    assert refusal("--state-dir", folder).startswith(f"error: {told}")
    found = findings("--state-dir", folder)
    assert found["state folder"]["detail"].startswith(told)
    assert f"folder {folder} can't be made" in found["catalog"]["detail"]


def test_the_doctor_finds_what_is_wrong_with_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("port = = 3")
    monkeypatch.setenv("TINKERCLOUD_CONFIG_FILE", str(file))

    (finding,) = findings().values()

    assert finding["check"] == "settings"
    assert f"{file}, which is no TOML" in finding["detail"]


def test_the_version_is_printed() -> None:
    printed = CliRunner().invoke(app, ["--version"]).output

    assert printed.split() == ["tinkercloud", importlib.metadata.version("tinkercloud-api")]
