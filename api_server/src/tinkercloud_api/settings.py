"""All settings of the API server and the `tinkercloud` command, in one place.

Sources, strongest first: arguments of the command, environment variables (`TINKERCLOUD_PORT=8001`;
nested ones with two underscores, `TINKERCLOUD_LIMITS__MAX_LORA_RANK=64`), then the TOML file named
by `TINKERCLOUD_CONFIG_FILE`. A key nobody knows is refused wherever it stands: a setting that does
nothing must not pass for one that works.
"""

import importlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SecretStr, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from tinkercloud_protocol.launch import (
    Limits,
    SamplerConfig,
    Timings,
    TrainerConfig,
    check_gpu_of_head,
)

ENV_PREFIX = "TINKERCLOUD_"
CONFIG_FILE_VARIABLE = f"{ENV_PREFIX}CONFIG_FILE"
KEY_PREFIX = "tml-"

_POSTGRESQL, _SQLITE = "postgresql+asyncpg", "sqlite+aiosqlite"
_OF_LIBPQ = {"sslmode": "ssl"}
"""What PostgreSQL's own clients call an option, and what its driver here does."""
_OF_ENVIRONMENT = {"sslrootcert", "sslcert", "sslkey", "sslcrl"}
"""Options of libpq that the driver reads from the environment alone, as libpq does too."""
_OF_SQLALCHEMY = {"prepared_statement_cache_size"}
"""Options of a URL that are not handed to the driver."""
_HEAD_BODY_BYTES = Limits().max_body_bytes
"""What heads of TrainingSessions take in one request."""
_USED_ON_KUBERNETES = {"limits.max_body_bytes", "timings.long_poll_seconds"}
"""Of what else is for the heads that a server starts itself."""
_INSTEAD_ON_KUBERNETES = {
    "models": "it serves the BaseModels of its namespace",
    "preload": "heads start when clients ask for them",
    "orphan_grace_seconds": "heads outlive every server",
    "head_start_seconds": "heads have half an hour, and trainers `trainer.startTimeoutSeconds` of"
    " the BaseModel",
    "trainer": "set `trainer` of the BaseModel",
    "sampler": "set `sampler` of the BaseModel",
    "limits.max_lora_rank": "set `limits.maxLoraRank` of the BaseModel",
    "limits.max_context_length": "set `maxContextLength` of the BaseModel",
    "limits.max_snapshot_bytes": "set `head.resources.scratch` of the BaseModel, half of which it"
    " is",
    "timings.drain_seconds": "set `sessions.drainSeconds` of the chart"
    " (TINKERCLOUD_OPERATOR_DRAIN_SECONDS)",
    "timings.suspend_seconds": "set `sessions.suspendSeconds` of the chart"
    " (TINKERCLOUD_OPERATOR_SUSPEND_SECONDS)",
}
"""What is for the heads that a server starts itself, and where the same is said of others."""


def _default_state_dir() -> Path:
    data_home = os.environ.get("XDG_DATA_HOME", "")
    return (Path(data_home) if data_home else Path.home() / ".local" / "share") / "tinkercloud"


class Settings(BaseSettings):
    """What an operator may decide. Immutable once read."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        # Among what came there are a key and a password.
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    provider: Literal["local", "kubernetes"] = "local"
    """Where session heads come from: `local` starts child processes of the server, `kubernetes`
    makes TrainingSessions, whose models are BaseModels of the cluster."""
    namespace: Annotated[str, Field(min_length=1, max_length=63)] = "default"
    """Kubernetes namespace of TrainingSessions and BaseModels, with `provider` kubernetes."""
    models_dir: Path | None = None
    """Folder in which volumes of BaseModels are mounted, each under its claim's name, for /hf to
    serve tokenizers from, with `provider` kubernetes."""
    host: str = "127.0.0.1"
    """Address to listen on. The service speaks plain HTTP: put TLS in front of any other."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 8000
    """Port to listen on; 0 takes a free one."""
    metrics_port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    """Port for Prometheus to read /metrics at, without a key, on the same address; by default
    nowhere."""
    state_dir: Path = Field(default_factory=_default_state_dir)
    """Folder for everything that must survive: catalog, checkpoints, heads."""
    database_url: SecretStr | None = None
    """SQLAlchemy URL of the catalog, `postgresql+asyncpg://USER:PASSWORD@HOST/DATABASE`, with
    `?ssl=require` for a connection that is encrypted, or `sqlite+aiosqlite:///FILE`; by default an
    SQLite file in `state_dir`."""
    checkpoint_root: str | None = None
    """URL of the object store for checkpoints: file:///..., s3://..., gs://..., az://...; by
    default a folder in `state_dir`. Credentials come from the environment as usual for the store.
    """
    models: dict[str, str] = Field(default_factory=dict)
    """Served models: the name SDK users ask for, and a local Hugging Face folder or the id of a
    model in the local Hugging Face cache."""
    bootstrap_key: SecretStr | None = None
    """An API key (`tml-...`) to register at start, for scripts and charts."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages to log: debug, info, warning or error."""
    log_format: Literal["console", "json"] = "console"
    """`console` for people, `json` for machines: one object a line."""
    hf_mirror: bool = True
    """Whether the tokenizers of the served models can be read, without a key, under /hf."""
    compress_uploads: bool = False
    """Whether clients compress forward_backward bodies: worth it over a slow network only."""
    orphan_grace_seconds: Annotated[float, Field(gt=0)] = 120.0
    """How long session heads outlive a server that was killed; one started within this time finds
    their models as they were."""
    preload: bool = True
    """Whether session heads are started with the server rather than when first needed. Each holds
    its whole model in memory."""
    head_start_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long a session head may take to load its model, beside the time that its ranks have, if
    it has any, to start (`trainer.start_timeout_seconds`)."""
    trainer: TrainerConfig = TrainerConfig()
    """How session heads train."""
    sampler: SamplerConfig = SamplerConfig()
    """How session heads sample."""
    limits: Limits = Limits()
    """What clients may ask for."""
    timings: Timings = Timings()
    """Durations of session heads."""

    # Not of the fields alone: what is said of a field shows what came for it.
    @model_validator(mode="after")
    def _has_secrets_that_can_be_used(self) -> "Settings":
        key = self.bootstrap_key
        if key is not None and not key.get_secret_value().startswith(KEY_PREFIX):
            raise ValueError(
                f"bootstrap_key: must begin with {KEY_PREFIX!r}: the SDK refuses other keys"
            )
        if self.database_url is not None:
            _check_database_url(self.database_url.get_secret_value())
        return self

    @model_validator(mode="after")
    def _fits_its_provider(self) -> "Settings":
        if self.provider == "kubernetes":
            _refuse_what_heads_are_told_elsewhere(self)
        if self.provider == "kubernetes" and self.checkpoint_root is None:
            raise ValueError(
                "checkpoint_root: required with provider=kubernetes; give the object store that"
                " the operator's checkpoint_root names"
            )
        if self.provider == "local" and self.models_dir is not None:
            raise ValueError("models_dir: only used with provider=kubernetes; leave it out")
        check_gpu_of_head(self.trainer, self.sampler)
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
        """Say which sources there are, strongest first (called by pydantic-settings)."""
        file = os.environ.get(CONFIG_FILE_VARIABLE)
        toml = (TomlConfigSettingsSource(settings_cls, Path(file)),) if file else ()
        return (init_settings, env_settings, *toml)

    @property
    def head_deadline_seconds(self) -> float:
        """How long a head may take to be ready: more than it gives its ranks."""
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
        """URL of the checkpoints' object store."""
        return self.checkpoint_root or (self.state_dir.absolute() / "checkpoints").as_uri()


def _check_database_url(text: str) -> None:
    """Refuse what no driver here takes; what came is not shown, since it holds a password.

    Raises:
        ValueError: the message names the field, and says what to write.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ValueError(
            f"database_url: is no URL; write {_POSTGRESQL}://USER:PASSWORD@HOST/DATABASE, where"
            " signs such as @ : / of a password are %40 %3A %2F"
        ) from None
    if url.drivername not in {_POSTGRESQL, _SQLITE}:
        raise ValueError(
            f"database_url: begins with {url.drivername}://, and {_POSTGRESQL}:// and {_SQLITE}://"
            " are accepted; the rest of the URL stays as it is"
        )
    if url.drivername == _SQLITE:
        return
    try:
        driver = importlib.import_module("asyncpg")
    except ImportError:
        raise ValueError(
            "database_url: PostgreSQL's driver is not installed; it comes with"
            " `pip install 'tinkercloud-api[postgres]'`"
        ) from None
    known = {*inspect.signature(driver.connect).parameters, *_OF_SQLALCHEMY}
    for name in url.query:
        if name not in known:
            instead = "leave it out"
            if name in _OF_LIBPQ:
                instead = f"write {_OF_LIBPQ[name]}={url.query[name]} in its place"
            elif name in _OF_ENVIRONMENT:
                instead = f"set PG{name.upper()} in the environment in its place"
            raise ValueError(
                f"database_url: asyncpg, PostgreSQL's driver, has no option {name}; {instead}"
            )


def _refuse_what_heads_are_told_elsewhere(settings: Settings) -> None:
    """Refuse settings of heads that a server with provider=kubernetes does not start.

    Raises:
        ValueError: the message names each, and says where it is set.
    """
    unused = [name for name in _given(settings) if name not in _USED_ON_KUBERNETES]
    if unused:
        instead = [
            f"{name}: not used with provider=kubernetes: {_instead(name)}" for name in unused
        ]
        raise ValueError("; ".join([*instead, "leave it out here"]))
    if settings.limits.max_body_bytes > _HEAD_BODY_BYTES:
        raise ValueError(
            f"limits.max_body_bytes: is {settings.limits.max_body_bytes}, and session heads take"
            f" {_HEAD_BODY_BYTES} with provider=kubernetes; give that or less"
        )


def _given(settings: Settings) -> Iterator[str]:
    """Yield the settings of heads that somebody has set, nested ones as `limits.max_lora_rank`."""
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
    return known.get(name) or known.get(group) or "heads there have its default"


class UnknownSettingError(Exception):
    """A setting that does not exist; the message names it."""


def load_settings(**overrides: Any) -> Settings:  # noqa: ANN401 - any field of Settings
    """Read the settings.

    Args:
        overrides: values that are stronger than environment and file; None means not given.

    Raises:
        UnknownSettingError: the environment holds a TINKERCLOUD_ variable nobody reads.
        pydantic.ValidationError: a value is not acceptable; the message names its field.
        pydantic_settings.SettingsError: a list or a table of the environment is not JSON.
        FileNotFoundError: the configuration file does not exist.
    """
    known = {f"{ENV_PREFIX}{name}".upper() for name in Settings.model_fields}
    for name in os.environ:
        stem = name.upper().split("__")[0]
        if stem.startswith(ENV_PREFIX) and stem not in known | {CONFIG_FILE_VARIABLE}:
            raise UnknownSettingError(
                f"environment variable {name} is not a setting; the settings are listed in"
                " docs/configuration.md"
            )
    file = os.environ.get(CONFIG_FILE_VARIABLE)
    if file and not Path(file).is_file():
        raise FileNotFoundError(f"{CONFIG_FILE_VARIABLE} names {file}, which does not exist")
    return Settings(**{name: value for name, value in overrides.items() if value is not None})
