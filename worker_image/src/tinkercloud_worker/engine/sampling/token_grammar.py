"""The interface of a grammar: which tokens may come next in a sample that must have a form."""

from collections.abc import Collection
from typing import Protocol

import numpy as np
import numpy.typing as npt


class TokenMatcher(Protocol):
    """Follows the tokens of one sequence. Belongs to one thread at a time.

    Shape legend: V tokens.
    """

    @property
    def is_complete(self) -> bool:
        """Whether the text so far has the form, so that it may end here."""

    def allowed(self, ends: Collection[int]) -> npt.NDArray[np.bool_]:
        """Return whether each token may come next [V]; further tokens of the model may not.

        Args:
            ends: tokens that end a sequence, which may come where the text is complete.

        Raises:
            InvalidRequest: the grammar takes too long here.
        """

    def add(self, token: int) -> None:
        """Append a token that is allowed and no end."""


class TokenGrammar(Protocol):
    """A compiled grammar."""

    @property
    def source(self) -> str:
        """The grammar in llguidance's dialect of Lark, for samplers that compile it themselves."""

    @property
    def is_needed(self) -> bool:
        """Whether samplers that take no grammars refuse the request, rather than ignore it."""

    def matcher(self) -> TokenMatcher:
        """Return a matcher before the first token. Thread-safe."""
