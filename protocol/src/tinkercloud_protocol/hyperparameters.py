"""Which adapter is trained and how a step is taken: what requests say, and engines compute with.

Engines run where nothing but torch and transformers is installed, so these are plain classes.
Requests and manifests have them as fields all the same: pydantic asks each annotation what it is
to check.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What pydantic checks of a value that comes from outside: its very type, and its bounds."""

    ge: float | None = None
    le: float | None = None
    lt: float | None = None

    def __get_pydantic_core_schema__(
        self, source: object, handler: Callable[[object], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the schema of the type, made strict, with the bounds there are."""
        bounds = {"ge": self.ge, "le": self.le, "lt": self.lt}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        return {**handler(source), **given, "strict": True}


Flag = Annotated[bool, Checked()]

_LIKE_WIRE_MODELS = {
    "extra": "ignore",
    "use_attribute_docstrings": True,
    "allow_inf_nan": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Which adapter to train. There is no alpha on the wire: it is 32 (numerics of the service).

    Raises:
        ValueError: it would train nothing.
    """

    __pydantic_config__: ClassVar = _LIKE_WIRE_MODELS

    rank: Annotated[int, Checked(ge=1, le=1024)]
    seed: Annotated[int, Checked(ge=0, lt=2**63)] | None = None
    """Seed of the initial weights; absent means a random one."""
    train_unembed: Flag = True
    train_mlp: Flag = True
    train_attn: Flag = True

    def __post_init__(self) -> None:
        """Check what is not of one field alone."""
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError("at least one of train_attn, train_mlp and train_unembed must be true")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """Hyperparameters of one optimizer step; defaults are the SDK's. Semantics: torch AdamW."""

    __pydantic_config__: ClassVar = _LIKE_WIRE_MODELS

    learning_rate: Annotated[float, Checked(ge=0)] = 1e-4
    beta1: Annotated[float, Checked(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Checked(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Checked(ge=1e-38)] = 1e-12
    """Float32 has nothing much smaller, and 0 would make NaN of a weight without a gradient, which
    all A of a fresh adapter are."""
    weight_decay: Annotated[float, Checked(ge=0)] = 0.0
    """Decoupled from the gradient, as in AdamW."""
    grad_clip_norm: Annotated[float, Checked(ge=0)] = 0.0
    """Largest global L2 norm of the accumulated gradient; 0 means no clipping."""
