"""Settings of programs that the server runs for its users."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class ProgramSettings(BaseModel):
    """Programs that the server runs for its users, such as RLVE."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    allow_code: bool = False
    """Whether admin keys may run any Python file or module on the server (`tinkercloud programs
    run`). Such a program can do everything that the server's user can. RLVE needs no permission."""
    max_per_owner: Annotated[int, Field(ge=0)] = 4
    """Maximum number of programs of one owner that run at the same time."""
    max_restarts: Annotated[int, Field(ge=0)] = 10
    """How often a program is restarted after failures."""
    memory_bytes: Annotated[int, Field(ge=1 << 28)] = 4 << 30
    """Maximum memory of each process of a program, in bytes (provider local)."""
    file_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    """Maximum size of each file that a program writes, in bytes (provider local)."""
    base_url: str | None = None
    """URL under which programs reach this server. Default: its own address."""
