"""How many cases the fuzz tests send, and what came of them."""

from dataclasses import dataclass


@dataclass
class Cases:
    """Counts the cases of all tests of a run."""

    number: int
    """Cases of each test."""
    sent: int = 0
    """Cases that all tests have sent."""
    growth: int = 0
    """The most bytes by which a process grew in one test."""

    def count(self) -> None:
        """Count a case that has been sent and answered."""
        self.sent += 1
