"""The settings of the API server and the `tinkercloud` command.

Sources, in order of precedence: command-line arguments, environment variables
(`TINKERCLOUD_PORT=8001`; nested settings with two underscores,
`TINKERCLOUD_LIMITS__MAX_LORA_RANK=64`), and the TOML file named by `TINKERCLOUD_CONFIG_FILE`.
Unknown settings are errors in every source, so that a misspelled setting is not silently ignored.
"""

import difflib
import importlib
import inspect
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, IPvAnyNetwork, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from tinkercloud_api.config.sections.download_settings import DownloadSettings, PublicUrl
from tinkercloud_api.config.sections.login_settings import OidcSettings
from tinkercloud_api.config.sections.price_settings import PriceSettings
from tinkercloud_api.config.sections.program_settings import ProgramSettings
from tinkercloud_api.config.sections.tenant_settings import TenantSettings
from tinkercloud_protocol.heads.autosave import AutosaveConfig
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.launch import (
    Limits,
    SamplerConfig,
    Timings,
    TrainerConfig,
    check_collector,
    check_gpu_of_trainer,
)
from tinkercloud_protocol.wire.json_model import sentences

ENV_PREFIX = "TINKERCLOUD_"
CONFIG_FILE_VARIABLE = f"{ENV_PREFIX}CONFIG_FILE"
OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""OpenTelemetry's own variable."""
KEY_PREFIX = "tml-"
"""Beginning of the keys that the SDK accepts. A key for other clients may have any beginning."""
_KEY_CHARACTERS = 16
"""Minimum length of a configured key. Keys are stored with a fast hash, which is safe for random
keys only."""
_KEY_DIFFERENT_CHARACTERS = 8
"""Minimum number of distinct characters; a key with fewer is not random."""

_POSTGRESQL, _SQLITE = "postgresql+asyncpg", "sqlite+aiosqlite"
_LIBPQ_OPTIONS = {"sslmode": "ssl"}
"""Options of libpq, and the names of the same options in asyncpg."""
_ENVIRONMENT_OPTIONS = {"sslrootcert", "sslcert", "sslkey", "sslcrl"}
"""Options of libpq that asyncpg reads from environment variables only."""
_SQLALCHEMY_OPTIONS = {"prepared_statement_cache_size"}
"""URL options that SQLAlchemy consumes and does not pass to the driver."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?=/)")
_STORES = frozenset({"file", "s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss"})
_HEAD_BODY_BYTES = Limits().max_body_bytes
"""Body size limit of session heads on Kubernetes."""
_USED_ON_KUBERNETES = {"limits.max_body_bytes", "timings.long_poll_seconds"}
"""Head settings that are also used with provider=kubernetes."""
_INSTEAD_ON_KUBERNETES = {
    "tenants": "create Tenants in the namespace",
    "models": "the server serves the BaseModels of its namespace",
    "preload": "heads start when clients need them",
    "orphan_grace_seconds": "heads do not depend on the API server",
    "session_expiry_days": "set `sessions.maxLifetimeSeconds` of the BaseModel",
    "head_start_seconds": "heads have half an hour to start, and trainers have"
    " `trainer.startTimeoutSeconds` of the BaseModel",
    "trainer": "set `trainer` of the BaseModel",
    "sampler": "set `sampler` of the BaseModel",
    "autosave": "set `head.autosave` of the BaseModel",
    "durability": "set `head.durability` of the BaseModel",
    "limits.max_lora_rank": "set `limits.maxLoraRank` of the BaseModel",
    "limits.max_context_length": "set `maxContextLength` of the BaseModel",
    "limits.max_snapshot_bytes": "it is half of `head.resources.scratch` of the BaseModel",
    "limits.max_paged_bytes": "it is a quarter of `head.resources.scratch` of the BaseModel, or of"
    " `trainer.resources.scratch` if it has trainer pods",
    "timings.drain_seconds": "set `sessions.drainSeconds` of the chart"
    " (TINKERCLOUD_OPERATOR_DRAIN_SECONDS)",
    "timings.suspend_seconds": "set `sessions.suspendSeconds` of the chart"
    " (TINKERCLOUD_OPERATOR_SUSPEND_SECONDS)",
}
"""Settings of local heads, and what to use instead with provider=kubernetes."""


def default_state_dir() -> Path:
    """Return the state folder of a server whose settings name none."""
    data_home = os.environ.get("XDG_DATA_HOME", "")
    return (Path(data_home) if data_home else Path.home() / ".local" / "share") / "tinkercloud"


class Settings(BaseSettings):
    """Settings of the API server. They are immutable."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        # The input contains an API key and a database password.
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    provider: Literal["local", "kubernetes"] = "local"
    """How session heads run: `local` starts them as child processes of the server; `kubernetes`
    creates TrainingSessions and serves the BaseModels of the cluster."""
    namespace: Annotated[str, Field(min_length=1, max_length=63)] = "default"
    """Kubernetes namespace of TrainingSessions and BaseModels (provider kubernetes)."""
    models_dir: Path | None = None
    """Folder in which the volumes of BaseModels are mounted, each in a subfolder named after its
    claim. /hf serves tokenizers from these volumes (provider kubernetes)."""
    host: str = "127.0.0.1"
    """Address to listen on. The server speaks plain HTTP: if it listens on any address other than
    localhost, terminate TLS in front of it."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 8000
    """Port to listen on; 0 selects a free port."""
    metrics_port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    """Port on which to serve Prometheus metrics (/metrics), on the same address and without an API
    key. Default: metrics are not served."""
    public_url: PublicUrl | None = None
    """Address of the server for clients, such as `https://tinker.example.com`. The URLs of
    downloads start with it. Default: the address to which a client sent its request."""
    trusted_proxies: list[IPvAnyNetwork] = Field(default=[], examples=[["10.0.0.0/8"]])
    """Addresses or networks of the proxies in front of the server. Only their X-Forwarded-For names
    the address of a client, which the audit log records and by which unknown keys are limited.
    Default: none, so that the address is that of the connection."""
    max_connections: Annotated[int, Field(gt=0)] | None = None
    """Maximum number of concurrent client connections. Further connections receive status 503. Each
    request that waits for a result occupies a connection. Default: derived from the limit on open
    files (`ulimit -Hn`)."""
    state_dir: Path = Field(default_factory=default_state_dir)
    """Folder for persistent state: the catalog, checkpoints, and files of session heads."""
    database_url: SecretStr | None = None
    """SQLAlchemy URL of the catalog database: `postgresql+asyncpg://USER:PASSWORD@HOST/DATABASE`,
    with `?ssl=require` for an encrypted connection, or `sqlite+aiosqlite:///FILE`. Default: an
    SQLite file in `state_dir`."""
    checkpoint_root: str | None = None
    """Where checkpoints are: a folder, or the URL of an object store: s3://..., gs://... or
    az://.... Default: a folder in `state_dir`. Credentials come from the store's usual
    variables."""
    max_checkpoint_bytes_per_owner: Annotated[int, Field(ge=0)] | None = None
    """Maximum total size, in bytes, of the checkpoints of one owner. When the limit is reached,
    checkpoints with new names are rejected. Default: no limit."""
    max_import_bytes: Annotated[int, Field(ge=1)] = 4 << 30
    """Maximum size, in bytes, of the adapter_model.safetensors file of an imported adapter."""
    models: dict[str, str] = Field(
        default_factory=dict, examples=[{"Qwen/Qwen3-0.6B": "/models/qwen3-0.6b"}]
    )
    """Models to serve. Maps the name of each model in the API to a local folder in Hugging Face
    format or to the ID of a model, which is downloaded unless the local Hugging Face cache has
    it."""
    aliases: dict[str, str] = Field(
        default_factory=dict, examples=[{"Qwen/Qwen3-4B-Instruct-2507": "Qwen/Qwen3-0.6B"}]
    )
    """Other names of served models, for programs with fixed model names. Maps each alias to the
    name of a model. Responses contain the model's own name."""
    bootstrap_key: SecretStr | None = None
    """API key to register at startup, for scripts and charts: at least 16 random characters. The
    SDK accepts only keys that start with `tml-`; other clients accept any key. Changing it revokes
    the previous key; a revoked key cannot be registered again. There is no default key."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of log messages: debug, info, warning or error."""
    log_format: Literal["console", "json"] = "console"
    """Log format: `console` for terminals, or `json` with one object per line."""
    otlp_endpoint: str | None = Field(default_factory=lambda: os.environ.get(OTLP_VARIABLE) or None)
    """Address of an OpenTelemetry collector, such as `http://collector:4318`, to which the server
    and its heads on this machine send spans of requests (OTLP over HTTP). Default: the variable
    OTEL_EXPORTER_OTLP_ENDPOINT; without it, no spans are made."""
    hf_mirror: bool = True
    """Whether /hf serves the tokenizers of the served models. It requires no API key."""
    compress_uploads: bool = False
    """Whether clients compress forward_backward requests, which is useful on slow networks."""
    access_tokens: bool = False
    """Whether SDK clients exchange keys for access tokens (JWT) of an hour; `whoami` needs it."""
    audit_days: Annotated[int, Field(ge=1, le=3650)] = 90
    """How long, in days, entries of the audit log are kept."""
    curve_days: Annotated[int, Field(ge=1, le=3650)] = 365
    """How long, in days, the curve of a run and its samples are kept after its last request."""
    orphan_grace_seconds: Annotated[float, Field(gt=0)] = 120.0
    """How long, in seconds, session heads keep running after their server is killed. A server that
    starts within this time takes over the heads and their models."""
    housekeeping_seconds: Annotated[float, Field(gt=0)] = 30.0
    """How often, in seconds, the server writes when sessions, runs and keys were last used, deletes
    what has expired, and reports runs that were lost with their heads."""
    session_silence_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Client inactivity, in seconds, after which a model is suspended. A client is inactive if the
    server receives neither its heartbeats nor its requests for the model. The session head then
    writes the model to the checkpoint store and frees its memory. The next request resumes the
    model. On Kubernetes this applies to models in pools; `sessions.idle` of the BaseModel applies
    to sessions with their own pods."""
    session_expiry_days: Annotated[float, Field(gt=0)] | None = 90.0
    """Client inactivity, in days, after which an open session ends. The states of its models are
    deleted, but its checkpoints are kept. A server ends sessions only after it has run for at least
    one day. None: sessions never end."""
    sample_wait_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long, in seconds, a `sample` request waits for its result. Then the response names the
    request, for retrieve_future. `asample`, which the SDK sends, does not wait."""
    preload: bool = True
    """Whether session heads start together with the server instead of on first use. Each head holds
    a whole model in memory."""
    head_start_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """Timeout, in seconds, for a session head to load its model. For heads with trainer ranks,
    `trainer.start_timeout_seconds` is added."""
    downloads: DownloadSettings = DownloadSettings()
    """Downloads of checkpoints."""
    trainer: TrainerConfig = TrainerConfig()
    """Trainer of the session heads."""
    sampler: SamplerConfig = SamplerConfig()
    """Sampler of the session heads."""
    limits: Limits = Limits()
    """Limits of client requests."""
    timings: Timings = Timings()
    """Timeouts and intervals of the session heads."""
    autosave: AutosaveConfig = AutosaveConfig()
    """How often the session heads save models automatically, in case a head is killed."""
    durability: DurabilityConfig = DurabilityConfig()
    """What survives when a session head on this machine is killed."""
    programs: ProgramSettings = ProgramSettings()
    """Programs that the server runs for its users."""
    oidc: OidcSettings | None = None
    """Login with an OpenID provider at `/login`, which issues API keys. Default: no login. Fields:
    `issuer`, `client_id` and others of the page docs/operate/login.md."""
    prices: PriceSettings = PriceSettings()
    """What tokens and storage cost, for `tinkercloud usage --month`."""
    tenants: dict[str, TenantSettings] = Field(
        default_factory=dict, examples=[{"research": {"owners": ["ada"], "limits": {"models": 4}}}]
    )
    """Limits of groups of owners, by name of the group. Runs over a limit wait. Fields: `owners`
    and `limits`, as in docs/operate/quotas.md."""

    # A validator of the model rather than of the fields, whose errors would show the secret values.
    @model_validator(mode="after")
    def _check_secrets(self) -> "Settings":
        if self.bootstrap_key is not None:
            _check_key(self.bootstrap_key.get_secret_value())
        if self.database_url is not None:
            _check_database_url(self.database_url.get_secret_value())
        _check_checkpoint_root(self.checkpoint_root)
        self.downloads.check_key()
        _check_telemetry(self.otlp_endpoint)
        if self.oidc is not None:
            self.oidc.check_public_url(self.public_url)
        return self

    @model_validator(mode="after")
    def _check_provider(self) -> "Settings":
        if self.provider == "kubernetes":
            _reject_head_settings(self)
        if self.provider == "kubernetes" and self.checkpoint_root is None:
            raise ValueError(
                "checkpoint_root: required with provider=kubernetes; set it to the operator's"
                " checkpoint_root"
            )
        if self.provider == "local" and self.models_dir is not None:
            raise ValueError("models_dir: only used with provider=kubernetes; remove it")
        check_gpu_of_trainer(self.trainer, self.sampler)
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - part of the interface
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in order of precedence (called by pydantic-settings)."""
        file = os.environ.get(CONFIG_FILE_VARIABLE)
        toml = (InitSettingsSource(settings_cls, _read_file(Path(file))),) if file else ()
        return (init_settings, env_settings, *toml)

    @property
    def head_deadline_seconds(self) -> float:
        """Timeout for a head to become ready, longer than that of its ranks."""
        ranks = self.trainer.start_timeout_seconds if self.trainer.ranks else 0.0
        return self.head_start_seconds + ranks

    @property
    def catalog_url(self) -> str:
        """SQLAlchemy URL of the catalog."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite+aiosqlite:///{self.state_dir / 'catalog.db'}"

    @property
    def checkpoint_url(self) -> str:
        """URL of the object store for checkpoints."""
        root = self.checkpoint_root
        if root is None:
            return (self.state_dir.absolute() / "checkpoints").as_uri()
        return root if _SCHEME.match(root) else Path(root).expanduser().absolute().as_uri()


def _check_checkpoint_root(root: str | None) -> None:
    """Check that checkpoints have a place that this release knows.

    Raises:
        ValueError: the message names the field and what is accepted.
    """
    found = _SCHEME.match(root or "")
    if root == "" or (found is not None and found[1].lower() not in _STORES):
        raise ValueError(
            f"checkpoint_root: got {root!r}; expected a folder, or a URL that starts with file:///,"
            " s3://, gs:// or az://"
        )


def _check_telemetry(endpoint: str | None) -> None:
    """Check that spans can be sent if they are wanted.

    Raises:
        ValueError: the address is none, or packages are missing; the message names the field and
            what is accepted, or the extra that has the packages.
    """
    if endpoint is None:
        return
    try:
        check_collector(endpoint)
    except ValueError as error:
        raise ValueError(f"otlp_endpoint: {error}") from None
    try:
        metadata.version("opentelemetry-exporter-otlp-proto-http")
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"otlp_endpoint: is {endpoint}, but OpenTelemetry's packages are not installed; install"
            f" them with `pip install 'tinkercloud[telemetry]'`, or unset it and {OTLP_VARIABLE}"
        ) from None


def _check_key(key: str) -> None:
    """Check that a header can carry a key and that it cannot be guessed, without showing the key.

    Raises:
        ValueError: the message names the field and what is accepted.
    """
    example = f"such as from `echo {KEY_PREFIX}$(openssl rand -hex 32)`"
    if not all("!" <= character <= "~" for character in key):
        raise ValueError(
            "bootstrap_key: contains spaces, control characters or characters outside ASCII, which"
            f" HTTP headers cannot carry; use a key {example}"
        )
    if len(key) < _KEY_CHARACTERS or len(set(key)) < _KEY_DIFFERENT_CHARACTERS:
        raise ValueError(
            f"bootstrap_key: has {len(key)} characters, {len(set(key))} of them distinct; at least"
            f" {_KEY_CHARACTERS} random characters are required, {example}"
        )


def _check_database_url(text: str) -> None:
    """Check that a driver supports a URL, without showing the URL, which contains a password.

    Raises:
        ValueError: the message names the field and what is accepted.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ValueError(
            f"database_url: not a valid URL; expected {_POSTGRESQL}://USER:PASSWORD@HOST/DATABASE,"
            " with special characters such as @ : / in the password escaped as %40 %3A %2F"
        ) from None
    if url.drivername not in {_POSTGRESQL, _SQLITE}:
        raise ValueError(
            f"database_url: unsupported scheme {url.drivername!r}; use {_POSTGRESQL}:// or"
            f" {_SQLITE}://"
        )
    if url.drivername == _SQLITE:
        return
    try:
        driver = importlib.import_module("asyncpg")
    except ImportError:
        raise ValueError(
            "database_url: the PostgreSQL driver is not installed; install it with"
            " `pip install 'tinkercloud[postgres]'`"
        ) from None
    known = {*inspect.signature(driver.connect).parameters, *_SQLALCHEMY_OPTIONS}
    for name in url.query:
        if name not in known:
            instead = "remove it"
            if name in _LIBPQ_OPTIONS:
                instead = f"use {_LIBPQ_OPTIONS[name]}={url.query[name]} instead"
            elif name in _ENVIRONMENT_OPTIONS:
                instead = f"set the environment variable PG{name.upper()} instead"
            raise ValueError(
                f"database_url: the PostgreSQL driver asyncpg has no option {name}; {instead}"
            )


def _reject_head_settings(settings: Settings) -> None:
    """Reject settings of local heads, which have no effect with provider=kubernetes.

    Raises:
        ValueError: the message names each setting and what to use instead.
    """
    unused = [name for name in _explicit(settings) if name not in _USED_ON_KUBERNETES]
    if unused:
        instead = [
            f"{name}: not used with provider=kubernetes: {_instead(name)}" for name in unused
        ]
        raise ValueError("; ".join([*instead, "remove it here"]))
    if settings.limits.max_body_bytes > _HEAD_BODY_BYTES:
        raise ValueError(
            f"limits.max_body_bytes: is {settings.limits.max_body_bytes}, but session heads accept"
            f" at most {_HEAD_BODY_BYTES} with provider=kubernetes; set at most that"
        )


def _explicit(settings: Settings) -> Iterator[str]:
    """Yield the names of explicitly set head settings; nested ones as `limits.max_lora_rank`."""
    heads = {name.partition(".")[0] for name in (*_INSTEAD_ON_KUBERNETES, *_USED_ON_KUBERNETES)}
    for name in sorted(heads & settings.model_fields_set):
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from (f"{name}.{part}" for part in sorted(value.model_fields_set))
        else:
            yield name


def _instead(name: str) -> str:
    group = name.partition(".")[0]
    known = _INSTEAD_ON_KUBERNETES
    return known.get(name) or known.get(group) or "heads on Kubernetes use the default"


class InvalidSettingsError(Exception):
    """A setting is unreadable, invalid or unknown; the message names it."""


def load_settings(**overrides: Any) -> Settings:  # noqa: ANN401 - any field of Settings
    """Read the settings.

    Args:
        overrides: values that take precedence over environment and file; None is ignored.

    Raises:
        InvalidSettingsError: the file is unreadable, a list or table in an environment variable is
            not JSON, or a setting is invalid or unknown.
    """
    known = {*Settings.model_fields, CONFIG_FILE_VARIABLE.removeprefix(ENV_PREFIX).lower()}
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX) and _path(name).partition(".")[0] not in known:
            raise InvalidSettingsError(_unknown(_path(name)))
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        raise InvalidSettingsError(sentences([_named(fault) for fault in faults])) from None
    except SettingsError as error:
        raise InvalidSettingsError("; ".join(_json_errors()) or str(error)) from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except ValueError as error:
        why = f"is not valid TOML ({error})"
    raise InvalidSettingsError(
        f"{CONFIG_FILE_VARIABLE}: {path} {why}; set it to the path of a TOML file"
    )


def _path(variable: str) -> str:
    """Return the setting of an environment variable, such as `limits.max_lora_rank`."""
    return variable[len(ENV_PREFIX) :].lower().replace("__", ".")


def _variable(path: str) -> str:
    return ENV_PREFIX + path.upper().replace(".", "__")


def _field(path: str) -> FieldInfo | None:
    """Return the field of a setting, or None if it does not exist."""
    fields: Mapping[str, FieldInfo] = Settings.model_fields
    field = None
    for name in path.split("."):
        field = fields.get(name)
        model = _table_of(field)
        fields = model.model_fields if model is not None else {}
    return field


def _table_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """Return the model of a field that is a table of settings, or None for other fields."""
    annotation = field.annotation if field is not None else None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _named(fault: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a fault whose setting is named as the user wrote it: variable or key in the file."""
    path = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        return {"type": fault["type"], "loc": (), "msg": _unknown(path)}
    if not path:
        return fault
    # Messages about a table start with the name of the affected setting in it.
    first, _, rest = fault["msg"].removeprefix("Value error, ").partition(": ")
    within = f"{path}.{first}"
    if _table_of(_field(path)) is not None and _field(within) is not None:
        return {"type": fault["type"], "loc": (_name(within),), "msg": rest}
    return {**fault, "loc": (_name(path),)}


def _name(path: str) -> str:
    group = _variable(path.partition(".")[0])
    is_from_environment = any(name.upper().partition("__")[0] == group for name in os.environ)
    return _variable(path) if is_from_environment else path


def _unknown(path: str) -> str:
    variable = next((name for name in os.environ if name.upper() == _variable(path)), None)
    file = os.environ.get(CONFIG_FILE_VARIABLE)
    where = f"{path} in {file}" if file else path
    name = f"environment variable {variable}" if variable else where
    near = _nearest(path)
    shown = _variable(near) if near and variable else near
    advice = f"did you mean {shown}? See" if shown else "see"
    return f"{name} is not a known setting; {advice} docs/operate/configuration.md for all settings"


def _nearest(path: str) -> str | None:
    """Return the setting whose name is most like an unknown one; None if there is none like it."""
    paths = list(_paths(Settings))
    # Some write one underscore where two belong, or leave the table out.
    plain = path.replace(".", "_")
    alike = {each.replace(".", "_"): each for each in paths}
    alike |= {each.rpartition(".")[2]: each for each in paths}
    if plain in alike:
        return alike[plain]
    return next(iter(difflib.get_close_matches(path, paths, 1)), None)


def _paths(table: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the names of all settings of a table, such as `limits.max_lora_rank`."""
    for name, field in table.model_fields.items():
        yield f"{prefix}{name}"
        if (inner := _table_of(field)) is not None:
            yield from _paths(inner, f"{prefix}{name}.")


def _json_errors() -> Iterator[str]:
    """Yield an error message for each variable that must contain JSON and does not."""
    for variable, value in os.environ.items():
        is_ours = variable.upper().startswith(ENV_PREFIX)
        field = _field(_path(variable)) if is_ours else None
        if field is None or not (_table_of(field) or field.examples):
            continue
        try:
            json.loads(value)
        except ValueError:
            yield (
                f"{variable}: not valid JSON; lists and tables must be JSON in environment"
                f" variables, for example {variable}='{json.dumps(_example(field))}'"
            )


def _example(field: FieldInfo) -> object:
    if field.examples:
        return field.examples[0]
    return dict([next(iter(field.get_default()))])
