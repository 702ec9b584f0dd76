"""Problems of rlve-gym: generating, showing and verifying them."""

import importlib.util
import random
import sys
import types
from dataclasses import dataclass
from typing import Any

from tinkercloud_protocol.programs.rlve import RlveConfig

_MARKERS = {"<answer></answer>": ("<answer>", "</answer>"), "\\boxed{}": ("\\boxed{", "}")}
_MAX_ATTEMPTS = 100
"""Environments may fail to generate a problem from a seed."""


def _import_gym() -> tuple[Any, Any]:
    """Return the environments and the parameter controllers of rlve-gym, by name.

    It needs torch only to seed torch's random numbers, which no environment uses: where torch is
    not installed, a module with nothing but these functions takes its place during the import.
    """
    is_missing = importlib.util.find_spec("torch") is None
    if is_missing:
        torch, cuda = types.ModuleType("torch"), types.ModuleType("torch.cuda")
        torch.manual_seed = lambda _seed: None  # type: ignore[attr-defined]
        cuda.manual_seed_all = lambda _seed: None  # type: ignore[attr-defined]
        torch.cuda = cuda  # type: ignore[attr-defined]
        sys.modules["torch"] = torch
    try:
        from Gym.environments import identifier2environment  # noqa: PLC0415 - after the stand-in
        from Gym.parameter_controllers import identifier2controller  # noqa: PLC0415
    finally:
        if is_missing:
            # Other packages ask whether torch is there.
            del sys.modules["torch"]
    return identifier2environment, identifier2controller


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on one response."""

    reward: float
    """-1 to 1."""
    accuracy: float
    """1 if the response solves the problem, else 0."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A generated problem."""

    environment: str
    difficulty: int
    text: str
    """What the model is asked."""
    _verifiable: Any

    def verify(self, response: str) -> Outcome:
        """Verify a response."""
        verdict = self._verifiable.verifier(response)
        return Outcome(float(verdict["reward"]), float(verdict["accuracy"]))


class Problems:
    """Generates problems of the configured environments."""

    def __init__(self, config: RlveConfig) -> None:
        self._environments, self._controllers = _import_gym()
        self._markers = _MARKERS[config.answer_marker_type]

    def generate(self, environment: str, difficulty: int, chance: random.Random) -> Problem:
        """Return a random problem.

        Raises:
            RuntimeError: the environment repeatedly failed to generate one.
        """
        controller = self._controllers[environment]()
        for _ in range(difficulty):
            controller.update()
        for _ in range(_MAX_ATTEMPTS):
            problem = self._environments[environment](answer_markers=self._markers)
            parameter = chance.choice(controller.get_parameter_list())
            if problem.generator(chance.randrange(2**31), parameter):
                return Problem(environment, difficulty, problem.prompt_generator(), problem)
        raise RuntimeError(
            f"environment {environment!r} generated no problem of difficulty {difficulty}"
        )
