"""Pipelined training loops with the SDK, whose curves are compared."""

from collections import deque
from collections.abc import Sequence

import tinker

from tinkercloud_testing.clients.sdk_steps import ADAM, a_datum

_AHEAD = 4
"""Steps that are sent before the first of them is awaited."""


class Loop:
    """A pipelined training loop with other data in each step."""

    def __init__(self, training: tinker.TrainingClient) -> None:
        """Train nothing yet."""
        self._training = training
        self.curve: list[tuple[float, float]] = []
        """Loss and number of each optimizer step."""

    def run(self, steps: int) -> Sequence[tuple[float, float]]:
        """Train; return the whole curve."""
        sent: deque[tuple[object, object]] = deque()
        for index in range(len(self.curve), len(self.curve) + steps):
            data = [a_datum(5 + index % 7), a_datum(11 + index % 5)]
            passed = self._training.forward_backward(data, "cross_entropy")
            sent.append((passed, self._training.optim_step(ADAM)))
            if len(sent) == _AHEAD:
                self._receive(*sent.popleft())
        while sent:
            self._receive(*sent.popleft())
        return self.curve

    def _receive(self, passed: object, applied: object) -> None:
        loss = passed.result().metrics["loss:sum"]  # type: ignore[attr-defined]
        number = applied.result().metrics["step"]  # type: ignore[attr-defined]
        self.curve.append((loss, number))
