"""How often a head saves its models by itself."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tinkercloud_protocol.requests.hyperparameters import LoraConfig


class AutosaveConfig(BaseModel):
    """When a head saves models by itself, so that a head that is killed does not lose them.

    The two latest automatic checkpoints of each model are kept. A model that has not changed is not
    saved.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    steps: Annotated[int, Field(ge=0)] = 50
    """Number of optimizer steps after which a model is saved. 0: steps are not counted."""
    seconds: Annotated[float, Field(ge=0)] = 300.0
    """Time, in seconds, after which a step is saved even if fewer than `steps` have followed. 0: no
    limit. If `steps` is 0 too, nothing is saved automatically."""
    whole_models: bool = False
    """Whether to save fully fine-tuned models as well. Each save writes 12 bytes per parameter, and
    takes twice as much memory in the head while it is written."""

    def applies_to(self, lora: LoraConfig | None) -> bool:
        """Return whether a model with this adapter, or without one, is saved."""
        return lora is not None or self.whole_models
