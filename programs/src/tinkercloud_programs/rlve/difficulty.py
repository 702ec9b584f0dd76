"""The difficulty of one environment, which rises as the model masters it."""

import random
from dataclasses import dataclass

from tinkercloud_protocol.programs.rlve import RlveConfig


@dataclass(slots=True)
class Difficulty:
    """The highest difficulty that is sampled, and how the model does there."""

    highest: int
    num_prompts: int = 0
    """Prompts of the highest difficulty since the last check."""
    metric_sum: float = 0.0
    """Sum of their mean accuracies."""
    metric: float | None = None
    """Mean accuracy at the last check."""
    total_prompts: int = 0
    """Prompts of any difficulty."""

    def choose(self, config: RlveConfig, chance: random.Random) -> int:
        """Return the difficulty of the next problem: any of the window below the highest."""
        lowest = max(0, self.highest - config.difficulty_sliding_window_size + 1)
        return chance.randint(lowest, self.highest)

    def record(self, difficulty: int, accuracy: float, config: RlveConfig) -> None:
        """Record the mean accuracy, 0 to 1, of all responses to one prompt.

        After enough prompts of the highest difficulty, their mean decides whether it rises.
        """
        self.total_prompts += 1
        if difficulty != self.highest:
            return
        self.num_prompts += 1
        self.metric_sum += accuracy
        if self.num_prompts < config.min_prompts_before_difficulty_check:
            return
        self.metric = self.metric_sum / self.num_prompts
        if self.metric >= config.min_metric_to_increase_difficulty:
            self.highest += 1
        self.num_prompts, self.metric_sum = 0, 0.0
