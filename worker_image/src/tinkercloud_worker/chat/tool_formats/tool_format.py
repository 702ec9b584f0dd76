"""What the server knows about a format of tool calls."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from tinkercloud_worker.chat.answer_parts import Part
from tinkercloud_worker.chat.rules.answer_rules import AnswerRule, Function, Reasoning


class CallReader(Protocol):
    """Splits the growing text of one answer. Text that only looks like a call stays text."""

    def add(self, text: str) -> list[Part]:
        """Append text; return the parts that are certain."""

    def finish(self) -> list[Part]:
        """Return the rest; a call that was not closed is one if it is complete."""


class ToolFormat(ABC):
    """A format. Formats have no state."""

    name: ClassVar[str]
    """Its name in messages and in the documentation."""
    marks: ClassVar[tuple[str, ...]]
    """Texts that mark parts of answers. Clients see them, also if they are special tokens."""

    @abstractmethod
    def is_of(self, template: str) -> bool:
        """Return whether a chat template writes calls in this format."""

    @abstractmethod
    def reader(self, offered: Sequence[Function]) -> CallReader | None:
        """Return a reader before the first text of an answer; None if all of it is text.

        Args:
            offered: the tools that the model may call. Calls of others are calls, too.
        """

    @abstractmethod
    def source(self, rule: AnswerRule, reasoning: Reasoning) -> str:
        """Return the grammar of a rule, after reasoning if the template has it.

        Raises:
            InvalidRequest: the format can't express a schema or a name.
        """

    def history(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return the messages of a conversation as the templates of the format expect them."""
        return messages
