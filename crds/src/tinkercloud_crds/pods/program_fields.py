"""Programs that run in a session's namespace, and what a BaseModel allows them.

A program is an ordinary client of the API server, such as a recipe of the cookbook, that runs as a
Job next to the session instead of on a laptop.
"""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tinkercloud_crds.pods.placement import ObjectName
from tinkercloud_crds.pods.shapes import Image, Message, Quantity, Seconds, Text
from tinkercloud_crds.structural import Part, Schema, rules

ProgramPhase = Literal["Pending", "Running", "Succeeded", "Failed", "Stopped"]

ProgramId = Annotated[
    str, Field(max_length=63, pattern=r"^[0-9A-Za-z]([-0-9A-Za-z]*[0-9A-Za-z])?$")
]
SecretKey = Annotated[str, Field(max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]

_RESERVED = ("TINKER_API_KEY", "TINKER_BASE_URL", "HF_ENDPOINT", "HOME")
"""Variables that the operator sets, in addition to those that start with `TINKERCLOUD_`."""


class ProgramVariable(Part):
    """An environment variable of a program."""

    name: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=1024)]
    """Value of the variable, as it is: `$(NAME)` is not replaced."""


ProgramVariables = Annotated[
    list[ProgramVariable],
    Field(
        default_factory=list,
        max_length=32,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            **rules(
                (
                    "self.all(item, !item.name.startsWith('TINKERCLOUD_')"
                    f" && !(item.name in {list(_RESERVED)}))",
                    f"{', '.join(_RESERVED)} and names that start with TINKERCLOUD_ are set by the"
                    " operator; remove them",
                ),
            ),
        },
    ),
]
"""Environment variables with unique names."""


class ApiKeySecret(Part):
    """The Secret with the API key of a program."""

    name: ObjectName
    """Name of the Secret."""
    key: SecretKey = "apiKey"
    """Entry of the Secret that is the key (`tml-...`). Its owner must be that of the session."""


class SourceSecret(Part):
    """The Secret with the source of a program."""

    name: ObjectName
    """Name of the Secret."""
    key: SecretKey = "program.py"
    """Entry of the Secret that is the Python file."""


def _only_with_another_id() -> Schema:
    """Return the rule that only another id makes another program; `stop` may always change."""
    optional = ("module", "args", "env", "image", "sourceSecret")
    same = " && ".join(
        f"has(self.{name}) == has(oldSelf.{name})"
        f" && (!has(self.{name}) || self.{name} == oldSelf.{name})"
        for name in optional
    )
    return rules(
        (
            "(has(self.id) && (!has(oldSelf.id) || self.id != oldSelf.id))"
            f" || (has(self.id) == has(oldSelf.id) && self.apiKeySecret == oldSelf.apiKeySecret"
            f" && {same})",
            "is immutable except for stop; set another id to replace the program",
        )
    )


class Program(Part):
    """A program that runs next to the session, in a Job, as soon as the session is ready."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.module) != has(self.sourceSecret)",
                "set exactly one of module and sourceSecret",
            ),
        )
    )

    id: ProgramId | None = None
    """ID of the program. The API server sets it for programs that clients start. Another ID
    replaces the program."""
    module: (
        Annotated[
            str,
            Field(
                max_length=200,
                pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$",
            ),
        ]
        | None
    ) = None
    """Python module in the image, which `python -m` runs, such as
    `tinker_cookbook.recipes.sl_basic`."""
    source_secret: SourceSecret | None = None
    """The Python file to run, if it is not a module of the image."""
    args: Annotated[
        list[Annotated[str, Field(max_length=16384)]],
        Field(default_factory=list, max_length=128),
    ]
    """Command-line arguments."""
    env: ProgramVariables
    """Additional environment variables."""
    image: Image | None = None
    """Image of the program, one of the BaseModel's `programs.images`. Defaults to the BaseModel's
    `programs.defaultImage`."""
    api_key_secret: ApiKeySecret
    """The API key that the program uses."""
    stop: bool = False
    """Whether to stop the program. It starts again if this is cleared."""


ProgramField = Annotated[Program, Field(json_schema_extra=_only_with_another_id())]


class ProgramStatus(Part):
    """Most recently observed state of a program."""

    id: ProgramId | None = None
    """The `spec.program.id` that this is about."""
    phase: ProgramPhase = "Pending"
    """`Pending`: it waits for the session, for its image or for a node. `Running`: it runs, or
    waits for its next restart. `Succeeded`, `Failed` and `Stopped`: it has ended."""
    job: Text | None = None
    """Name of its Job, if it exists."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Number of failed attempts of its Job."""
    exit_code: int | None = None
    """Status of the newest failed exit; 128 and the number of the signal that ended it."""
    start_time: Annotated[str, Field(max_length=40)] | None = None
    """When it first started (RFC 3339)."""
    finish_time: Annotated[str, Field(max_length=40)] | None = None
    """When it ended (RFC 3339)."""
    message: Message | None = None
    """Reason for the current phase; while running, the most recent failure."""


class ProgramResources(Part):
    """Resources of a program. Requests and limits are equal."""

    cpu: Quantity = "1"
    """CPU."""
    memory: Quantity = "2Gi"
    """Memory."""
    scratch: Quantity = "4Gi"
    """Size of each of two local volumes: the program's folder, and /tmp. They are deleted with the
    pod."""


class Programs(Part):
    """The programs that sessions of a BaseModel may run."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.defaultImage) || self.defaultImage in self.images",
                "defaultImage: must be one of images",
            ),
        )
    )

    images: Annotated[list[Image], Field(min_length=1, max_length=32)]
    """Images that programs may use. They contain Python and the programs' packages."""
    default_image: Image | None = None
    """Image of programs that name none. Defaults to the first of `images`."""
    resources: ProgramResources = ProgramResources()
    """Resources of a program."""
    backoff_limit: Annotated[int, Field(ge=0, le=1000)] = 6
    """How often a program that fails is restarted."""
    active_deadline_seconds: Seconds | None = None
    """Maximum running time of a program, in seconds, including restarts. If unset, it is
    unlimited."""

    def image_of(self, program: Program) -> str:
        """Return the image that a program uses."""
        return program.image or self.default_image or self.images[0]
