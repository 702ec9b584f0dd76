"""Separates the reasoning before an answer: for JSON, which clients parse, and on request.

Before calls it is separated, too, since models draft them there; then it becomes text again.
"""

from tinkercloud_worker.chat.answer_parts import Thought, suffix_length
from tinkercloud_worker.chat.rules.answer_rules import THINK, THINK_END, Reasoning


class ThoughtSplitter:
    """Splits a growing text into reasoning and what follows it."""

    def __init__(self, reasoning: Reasoning, *, is_text: bool = False) -> None:
        """Start before the first token.

        Args:
            reasoning: whether the text begins with reasoning, or within it.
            is_text: whether reasoning keeps its tags, and what follows its white space.
        """
        self.is_text = is_text
        self._held = ""
        """Text that may be a part of a tag."""
        self._tag = {Reasoning.POSSIBLE: THINK, Reasoning.OPEN: THINK_END}.get(reasoning)
        """The tag that is searched; None after reasoning, or without it."""
        self._follows = False
        """Whether the next text follows reasoning, and white space before it is not kept."""

    def add(self, text: str) -> list[str]:
        """Append text; return the parts that are certain."""
        self._held += text
        if self._tag == THINK:
            if THINK.startswith(self._held) and self._held != THINK:
                return []
            is_thought = self._held.startswith(THINK)
            if not self.is_text:
                self._held = self._held.removeprefix(THINK)
            self._tag = THINK_END if is_thought else None
        if self._tag == THINK_END:
            thought, tag, rest = self._held.partition(THINK_END)
            if not tag:
                certain = len(thought) - suffix_length(thought, THINK_END)
                return self._taken(certain)
            if self.is_text:
                thought += tag
            self._held, self._tag, self._follows = rest, None, not self.is_text
            return [*([Thought(thought)] if thought else []), *self.add("")]
        if self._follows:
            self._held = self._held.lstrip()
            self._follows = not self._held
        return self._taken(len(self._held))

    def finish(self) -> list[str]:
        """Return the rest of the text."""
        return self._taken(len(self._held))

    def _taken(self, length: int) -> list[str]:
        """Remove the beginning of the held text, and return it."""
        text, self._held = self._held[:length], self._held[length:]
        if not text:
            return []
        return [Thought(text) if self._tag == THINK_END else text]
