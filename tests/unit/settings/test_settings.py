"""Settings: sources, precedence and the rejection of unknown settings."""

import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinkercloud_api.cli import app
from tinkercloud_api.config.settings import InvalidSettingsError, load_settings
from tinkercloud_protocol.heads.launch import Limits


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


def test_an_unknown_variable_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_PROT", "1")

    with pytest.raises(InvalidSettingsError, match="TINKERCLOUD_PROT"):
        load_settings()


def test_an_unknown_nested_variable_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_LIMITS__MAX_RANK", "1")

    with pytest.raises(
        InvalidSettingsError, match="variable TINKERCLOUD_LIMITS__MAX_RANK is not a known"
    ):
        load_settings()


def test_an_unknown_key_in_the_file_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("prot = 1\n")
    monkeypatch.setenv("TINKERCLOUD_CONFIG_FILE", str(file))

    with pytest.raises(
        InvalidSettingsError, match=rf"prot in {file} is not a known setting; .*docs/"
    ):
        load_settings()


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("TINKERCLOUD_MODLES", "did you mean TINKERCLOUD_MODELS?"),
        ("TINKERCLOUD_LIMITS__MAX_LORA_RNK", "did you mean TINKERCLOUD_LIMITS__MAX_LORA_RANK?"),
        ("TINKERCLOUD_LIMIT__MAX_LORA_RANK", "did you mean TINKERCLOUD_LIMITS__MAX_LORA_RANK?"),
        ("TINKERCLOUD_LIMITS_MAX_LORA_RANK", "did you mean TINKERCLOUD_LIMITS__MAX_LORA_RANK?"),
        ("TINKERCLOUD_MAX_LORA_RANK", "did you mean TINKERCLOUD_LIMITS__MAX_LORA_RANK?"),
        ("TINKERCLOUD_XYZZY", "see docs/operate/configuration.md"),
    ],
)
def test_an_unknown_variable_is_rejected_with_the_most_similar_setting(
    monkeypatch: pytest.MonkeyPatch, variable: str, near: str
) -> None:
    monkeypatch.setenv(variable, "1")

    with pytest.raises(InvalidSettingsError) as error:
        load_settings()

    assert f"environment variable {variable} is not a known setting; {near}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.toml", None, "No such file"),
        ("", None, "Is a directory"),
        ("wrong.toml", b"port = = 3", "is not valid TOML .*line 1"),
        ("binary.toml", b"\xff\xfe", "is not valid TOML .*utf-8"),
    ],
)
def test_an_unreadable_file_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("TINKERCLOUD_CONFIG_FILE", str(file))

    with pytest.raises(InvalidSettingsError, match=f"CONFIG_FILE: {file} .*{message}"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [("PORT", "x"), ("PORT", "70000"), ("LOG_LEVEL", "loud"), ("BOOTSTRAP_KEY", "secret")],
)
def test_an_invalid_value_is_rejected(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"TINKERCLOUD_{name}", value)

    with pytest.raises(InvalidSettingsError, match=f"TINKERCLOUD_{name}|bootstrap_key"):
        load_settings()


def test_gpu_weight_transfer_requires_a_trainer_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKERCLOUD_SAMPLER__BACKEND", "sglang")
    monkeypatch.setenv("TINKERCLOUD_SAMPLER__INFERENCE__URLS", '["http://engine:8000"]')
    monkeypatch.setenv("TINKERCLOUD_SAMPLER__INFERENCE__PROCESS_GROUP", "nccl")
    with pytest.raises(InvalidSettingsError, match=r"process_group: nccl requires .*device is cpu"):
        load_settings()

    monkeypatch.setenv("TINKERCLOUD_TRAINER__DEVICE", "cuda")

    assert load_settings().sampler.inference.process_group == "nccl"


def on_kubernetes(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Set the environment variables that the chart sets, and additional ones."""
    chosen = {"PROVIDER": "kubernetes", "CHECKPOINT_ROOT": "s3://checkpoints/x", **variables}
    for name, value in chosen.items():
        monkeypatch.setenv(f"TINKERCLOUD_{name}", value)


def rejection(*arguments: str) -> str:
    """Run a command with invalid settings and return its error message, on one line."""
    result = CliRunner().invoke(app, ["keys", "create", "me", *arguments])
    assert result.exit_code == 1
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MODELS", '{"a": "b"}', "models: .*the BaseModels of its namespace"),
        ("PRELOAD", "false", "preload: .*when clients need them"),
        ("ORPHAN_GRACE_SECONDS", "9", "orphan_grace_seconds: .*do not depend on the API server"),
        ("HEAD_START_SECONDS", "9", "head_start_seconds: .*trainer.startTimeoutSeconds"),
        ("TRAINER__DTYPE", "bfloat16", "trainer.dtype: .*set `trainer` of the BaseModel"),
        ("SAMPLER__MAX_QUEUED_REQUESTS", "9", "sampler.max_queued_requests: .*set `sampler` of"),
        ("LIMITS__MAX_LORA_RANK", "64", "limits.max_lora_rank: .*set `limits.maxLoraRank` of the"),
        ("LIMITS__MAX_CONTEXT_LENGTH", "9", "max_context_length: .*set `maxContextLength` of the"),
        ("LIMITS__MAX_SNAPSHOT_BYTES", "9", "max_snapshot_bytes: .*head.resources.scratch"),
        ("LIMITS__MAX_PAGED_BYTES", "9", "max_paged_bytes: .*head.resources.scratch"),
        (
            "LIMITS__MAX_RESULT_BYTES",
            "9",
            "limits.max_result_bytes: .*heads on Kubernetes use the default",
        ),
        ("AUTOSAVE__STEPS", "9", "autosave.steps: .*set `head.autosave` of the BaseModel"),
        ("TIMINGS__DRAIN_SECONDS", "9", "timings.drain_seconds: .*sessions.drainSeconds"),
        ("TIMINGS__SUSPEND_SECONDS", "9", "timings.suspend_seconds: .*sessions.suspendSeconds"),
        ("TIMINGS__GAP_SECONDS", "9", "timings.gap_seconds: .*heads on Kubernetes use the default"),
    ],
)
def test_head_settings_are_rejected_on_kubernetes_with_a_pointer_to_the_right_place(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    on_kubernetes(monkeypatch, **{name: value})

    with pytest.raises(InvalidSettingsError, match=message):
        load_settings()

    monkeypatch.setenv("TINKERCLOUD_PROVIDER", "local")
    load_settings()


def test_settings_that_the_server_itself_uses_are_accepted_on_kubernetes(
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


def test_the_body_limit_cannot_exceed_that_of_heads_on_kubernetes(
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
    ("url", "message"),
    [
        (
            "postgresql://u:hush@host/d",
            r"unsupported scheme 'postgresql'; use postgresql\+asyncpg:// or sqlite",
        ),
        ("postgres://u:hush@host/d", r"unsupported scheme 'postgres'; use postgresql\+asyncpg://"),
        ("sqlite:///catalog.db", r"unsupported scheme 'sqlite'; use .* or sqlite\+aiosqlite://"),
        ("postgresql+asyncpg://u:hush@h/d?sslmode=require", "use ssl=require instead"),
        (
            "postgresql+asyncpg://u:hush@h/d?ssl=verify-full&sslrootcert=/ca.pem",
            "sslrootcert; set the environment variable PGSSLROOTCERT instead",
        ),
        (
            "postgresql+asyncpg://u:hush@h/d?channel_binding=require",
            "channel_binding; remove it",
        ),
        (
            "postgresql+asyncpg://u@host:hush/d",
            r"not a valid URL; expected postgresql\+asyncpg://USER",
        ),
        ("hush", r"not a valid URL; expected postgresql\+asyncpg://USER"),
    ],
)
def test_an_unsupported_database_url_is_rejected_with_the_supported_ones_and_no_password(
    monkeypatch: pytest.MonkeyPatch, url: str, message: str
) -> None:
    monkeypatch.setenv("TINKERCLOUD_DATABASE_URL", url)

    printed = rejection()

    assert printed.startswith("error: settings: database_url: ")
    assert re.search(message, printed)
    assert "hush" not in printed


def test_a_missing_driver_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    monkeypatch.setenv("TINKERCLOUD_DATABASE_URL", "postgresql+asyncpg://u:p@h/d")

    assert "pip install 'tinkercloud[postgres]'" in rejection()


def test_spans_go_where_opentelemetry_s_own_variable_says_unless_a_setting_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoints = [load_settings().otlp_endpoint]
    for name, value in (
        ("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://theirs:4318"),
        ("TINKERCLOUD_OTLP_ENDPOINT", "http://ours:4318"),
    ):
        monkeypatch.setenv(name, value)
        endpoints.append(load_settings().otlp_endpoint)

    assert endpoints == [None, None, "http://theirs:4318", "http://ours:4318"]


@pytest.mark.parametrize("url", ["collector:4318", "http://me:hush@collector", "ftp://a", ""])
def test_an_address_to_which_no_spans_can_be_sent_is_rejected_without_its_password(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("TINKERCLOUD_OTLP_ENDPOINT", url)

    message = rejection()

    assert "otlp_endpoint: got" in message
    assert "such as http://collector:4318" in message
    assert "hush" not in message


def test_spans_without_what_sends_them_are_rejected_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")

    assert "pip install 'tinkercloud[telemetry]'" in rejection()


def test_an_error_about_several_settings_is_clear_and_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKERCLOUD_PROVIDER", "kubernetes")
    monkeypatch.setenv("TINKERCLOUD_BOOTSTRAP_KEY", "tml-hush-this-is-the-secret-key")

    message = rejection()

    assert message.startswith("error: settings: checkpoint_root: required with provider=kubernetes")
    assert "hush" not in message


@pytest.mark.parametrize("weak", ["secret", "tml-random-8fK2", "abab" * 16])
def test_a_guessable_key_is_rejected_with_instructions_and_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, weak: str
) -> None:
    monkeypatch.setenv("TINKERCLOUD_BOOTSTRAP_KEY", weak)

    message = rejection()

    assert message.startswith(f"error: settings: bootstrap_key: has {len(weak)} characters, ")
    assert "`echo tml-$(openssl rand -hex 32)`" in message
    assert weak not in message


@pytest.mark.parametrize("key", ["a-key-that-0ur-users-chose", "tml-9f3c1b7a62d84e"])
def test_a_key_needs_no_prefix(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("TINKERCLOUD_BOOTSTRAP_KEY", key)

    configured = load_settings().bootstrap_key

    assert configured is not None
    assert configured.get_secret_value() == key


@pytest.mark.parametrize("key", ["hush-there-is a-space-in-it", "hush-this-is-not-äscii-1234"])
def test_a_key_that_no_header_can_carry_is_rejected_and_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("TINKERCLOUD_BOOTSTRAP_KEY", key)

    message = rejection()

    assert "HTTP headers cannot carry" in message
    assert "hush" not in message


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("MODELS", '{"Qwen/Qwen3-0.6B": "/models/qwen3-0.6b"}'),
        ("SAMPLER__INFERENCE__URLS", '["http://127.0.0.1:30000"]'),
        ("TRAINER", '{"backend": "torch"}'),
        ("SAMPLER__INFERENCE", '{"kind": "sglang"}'),
    ],
)
def test_a_list_or_table_that_is_not_json_is_rejected_with_an_example(
    monkeypatch: pytest.MonkeyPatch, name: str, example: str
) -> None:
    monkeypatch.setenv(f"TINKERCLOUD_{name}", "foo")

    with pytest.raises(InvalidSettingsError) as refused:
        load_settings()

    assert str(refused.value) == (
        f"TINKERCLOUD_{name}: not valid JSON; lists and tables must be JSON in environment"
        f" variables, for example TINKERCLOUD_{name}='{example}'"
    )
    monkeypatch.setenv(f"TINKERCLOUD_{name}", example)
    if name != "SAMPLER__INFERENCE__URLS":
        load_settings()


def test_an_error_in_a_table_names_the_setting_in_the_source_where_the_table_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    message = "0, but backend megatron requires ranks; set ranks to 1 or more"
    (tmp_path / "settings.toml").write_text('[trainer]\nbackend = "megatron"\n')

    monkeypatch.setenv("TINKERCLOUD_CONFIG_FILE", str(tmp_path / "settings.toml"))
    assert rejection() == f"error: settings: trainer.ranks: {message}"
    monkeypatch.setenv("TINKERCLOUD_TRAINER__BACKEND", "megatron")
    assert rejection() == f"error: settings: TINKERCLOUD_TRAINER__RANKS: {message}"


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_BOOTSTRAP_KEY", "tml-hush-this-is-the-secret-key")
    monkeypatch.setenv("TINKERCLOUD_DATABASE_URL", "postgresql+asyncpg://u:hush@h/d")

    assert "hush" not in repr(load_settings())


def test_the_start_timeout_of_a_head_includes_that_of_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKERCLOUD_HEAD_START_SECONDS", "10")
    monkeypatch.setenv("TINKERCLOUD_TRAINER__START_TIMEOUT_SECONDS", "7200")

    assert load_settings().head_deadline_seconds == 10
    monkeypatch.setenv("TINKERCLOUD_TRAINER__RANKS", "2")
    assert load_settings().head_deadline_seconds == 7210


def test_the_start_timeout_of_ranks_must_be_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERCLOUD_TRAINER__START_TIMEOUT_SECONDS", "0")

    with pytest.raises(InvalidSettingsError, match="TINKERCLOUD_TRAINER__START_TIMEOUT_SECONDS"):
        load_settings()


def findings(*arguments: str) -> dict[str, dict[str, str]]:
    """Return the failed checks of `tinkercloud doctor`, by name."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    assert result.exit_code == 1
    return {row["check"]: row for row in json.loads(result.stdout) if row["result"] == "FAILED"}


@pytest.mark.parametrize("folder", ["/proc/nope", "/etc/hostname"])
def test_an_unusable_state_folder_is_reported_in_one_sentence(folder: str) -> None:
    message = f"state_dir: cannot use {folder} ("

    assert rejection("--state-dir", folder).startswith(f"error: {message}")
    found = findings("--state-dir", folder)
    assert found["state folder"]["detail"].startswith(message)
    assert f"cannot create the catalog folder {folder}" in found["catalog"]["detail"]


def test_the_doctor_reports_invalid_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("port = = 3")
    monkeypatch.setenv("TINKERCLOUD_CONFIG_FILE", str(file))

    (finding,) = findings().values()

    assert finding["check"] == "settings"
    assert f"{file} is not valid TOML" in finding["detail"]


def test_the_version_is_printed() -> None:
    printed = CliRunner().invoke(app, ["--version"]).output

    assert printed.split() == ["tinkercloud", importlib.metadata.version("tinkercloud-api")]
