"""All settings of the API server and the `tinkercloud` command, in one place.

Sources, strongest first: arguments of the command, environment variables (`TINKERCLOUD_PORT=8001`;
nested ones with two underscores, `TINKERCLOUD_LIMITS__MAX_LORA_RANK=64`), then the TOML file named
by `TINKERCLOUD_CONFIG_FILE`. A key nobody knows is refused wherever it stands: a setting that does
nothing must not pass for one that works.
"""

import importlib
import inspect
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SecretStr, ValidationError, model_validator
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

from tinkercloud_protocol.launch import (
    Limits,
    SamplerConfig,
    Timings,
    TrainerConfig,
    check_gpu_of_trainer,
)
from tinkercloud_protocol.wire import sentences

ENV_PREFIX = "TINKERCLOUD_"
CONFIG_FILE_VARIABLE = f"{ENV_PREFIX}CONFIG_FILE"
KEY_PREFIX = "tml-"
_KEY_CHARACTERS = 22
"""Of a configured key, behind the prefix: 128 random bits in base64. It is stored under a fast
hash, which is safe for random keys only."""
_KEY_DIFFERENT_CHARACTERS = 8
"""Among them: fewer are no random key."""

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
    "session_expiry_days": "sessions have a lifetime of their own: set"
    " `sessions.maxLifetimeSeconds` of the BaseModel",
    "session_silence_seconds": "sessions have idle rules of their own: set"
    " `sessions.idle` of the BaseModel",
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
    max_connections: Annotated[int, Field(gt=0)] | None = None
    """How many connections of clients are served at once; more are answered 503. A result that is
    waited for takes one. By default what there are file descriptors for (`ulimit -Hn`)."""
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
    max_checkpoint_bytes_per_owner: Annotated[int, Field(ge=0)] | None = None
    """Bytes that the checkpoints of one owner may have, all runs together; absent means no limit. A
    save under a new name is refused once they have as many."""
    models: dict[str, str] = Field(
        default_factory=dict, examples=[{"Qwen/Qwen3-0.6B": "/models/qwen3-0.6b"}]
    )
    """Served models: the name SDK users ask for, and a local Hugging Face folder or the id of a
    model in the local Hugging Face cache."""
    bootstrap_key: SecretStr | None = None
    """An API key to register at start, for scripts and charts: `tml-` and at least 22 random
    characters. Another one in its place revokes it; one that was revoked stays refused."""
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
    session_silence_seconds: Annotated[float, Field(gt=0)] = 900.0
    """How long after the last heartbeat of a client, and the last request for a model of it, the
    session head writes the model to the checkpoint store and frees its memory. The next request
    brings it back as it was, however much later."""
    session_expiry_days: Annotated[float, Field(gt=0)] | None = 90.0
    """How many days after the last heartbeat of a client, and the last request for a model of it,
    its session ends, if it has not been closed: what its models had become is deleted then, and its
    checkpoints stay. The server must have been up for the last day of them. None: never."""
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
        if self.bootstrap_key is not None:
            _check_key(self.bootstrap_key.get_secret_value())
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
        """Say which sources there are, strongest first (called by pydantic-settings)."""
        file = os.environ.get(CONFIG_FILE_VARIABLE)
        toml = (InitSettingsSource(settings_cls, _read_file(Path(file))),) if file else ()
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


def _check_key(key: str) -> None:
    """Refuse a key that the SDK does not send or that can be guessed; it is not shown.

    Raises:
        ValueError: the message names the field, and says what to write.
    """
    if not key.startswith(KEY_PREFIX):
        raise ValueError(
            f"bootstrap_key: must begin with {KEY_PREFIX!r}: the SDK refuses other keys"
        )
    rest = key.removeprefix(KEY_PREFIX)
    if len(rest) < _KEY_CHARACTERS or len(set(rest)) < _KEY_DIFFERENT_CHARACTERS:
        raise ValueError(
            f"bootstrap_key: has {len(rest)} characters behind {KEY_PREFIX!r}, {len(set(rest))} of"
            f" them different; at least {_KEY_CHARACTERS} random ones are needed, as from"
            f" `echo {KEY_PREFIX}$(openssl rand -hex 32)`"
        )


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


class InvalidSettingsError(Exception):
    """A setting can't be read, is not acceptable or does not exist; the message names it."""


def load_settings(**overrides: Any) -> Settings:  # noqa: ANN401 - any field of Settings
    """Read the settings.

    Args:
        overrides: values that are stronger than environment and file; None means not given.

    Raises:
        InvalidSettingsError: the file can't be read, a list or a table of the environment is not
            JSON, a value is not acceptable, or nobody knows its name.
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
        raise InvalidSettingsError("; ".join(_wants_of_json()) or str(error)) from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        why = f"can't be read ({error.strerror})"
    except ValueError as error:
        why = f"is no TOML ({error})"
    raise InvalidSettingsError(
        f"{CONFIG_FILE_VARIABLE} names {path}, which {why}; name a TOML file"
    )


def _path(variable: str) -> str:
    """Return which setting a variable is, as `limits.max_lora_rank`."""
    return variable[len(ENV_PREFIX) :].lower().replace("__", ".")


def _variable(path: str) -> str:
    return ENV_PREFIX + path.upper().replace(".", "__")


def _field(path: str) -> FieldInfo | None:
    """Return a setting; None if there is none of this name."""
    fields: Mapping[str, FieldInfo] = Settings.model_fields
    field = None
    for name in path.split("."):
        field = fields.get(name)
        model = _table_of(field)
        fields = model.model_fields if model is not None else {}
    return field


def _table_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """Return the settings of which a field is a table; None if it is not one."""
    annotation = field.annotation if field is not None else None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _named(fault: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a fault told by the name that its setting has where it, or one beside it, is set."""
    path = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        return {"type": fault["type"], "loc": (), "msg": _unknown(path)}
    if not path:
        return fault
    # What is said of a table begins with which of its settings it is about.
    first, _, rest = fault["msg"].removeprefix("Value error, ").partition(": ")
    within = f"{path}.{first}"
    if _table_of(_field(path)) is not None and _field(within) is not None:
        return {"type": fault["type"], "loc": (_name(within),), "msg": rest}
    return {**fault, "loc": (_name(path),)}


def _name(path: str) -> str:
    group = _variable(path.partition(".")[0])
    is_by_variable = any(name.upper().partition("__")[0] == group for name in os.environ)
    return _variable(path) if is_by_variable else path


def _unknown(path: str) -> str:
    given = next((name for name in os.environ if name.upper() == _variable(path)), None)
    file = os.environ.get(CONFIG_FILE_VARIABLE)
    where = f"{path} in {file}" if file else path
    name = f"environment variable {given}" if given else where
    return f"{name} is not a setting; the settings are listed in docs/configuration.md"


def _wants_of_json() -> Iterator[str]:
    """Yield what to write for each variable that must be JSON and is not."""
    for variable, value in os.environ.items():
        is_ours = variable.upper().startswith(ENV_PREFIX)
        field = _field(_path(variable)) if is_ours else None
        if field is None or not (_table_of(field) or field.examples):
            continue
        try:
            json.loads(value)
        except ValueError:
            yield (
                f"{variable} is not JSON, as lists and tables are in variables; write for example"
                f" {variable}='{json.dumps(_example(field))}'"
            )


def _example(field: FieldInfo) -> object:
    if field.examples:
        return field.examples[0]
    return dict([next(iter(field.get_default()))])
