"""What a request of either wire format asks for, and the choices that answer it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import orjson
from pydantic import ValidationError

from tinkercloud_protocol.requests.sampling_requests import Chunk, SamplingParams
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.exact_json import read_body
from tinkercloud_protocol.wire.json_model import WireModel, describe
from tinkercloud_worker.chat.answer_parts import Part, Thought, ToolCall
from tinkercloud_worker.chat.rules.answer_rules import AnswerRule, Function
from tinkercloud_worker.chat.text import ChatText, ShownText
from tinkercloud_worker.chat.thoughts import ThoughtSplitter
from tinkercloud_worker.chat.tool_formats.tool_format import CallReader
from tinkercloud_worker.engine.sampling.sampler_interface import SampledToken

ModelT = TypeVar("ModelT", bound=WireModel)

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 1 << 12
"""Messages of a conversation. Templates loop over them, some several times."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model should reason, for templates with the variable `reasoning_effort`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, independent of its wire format."""

    model: str
    """The name under which the client asked for the model."""
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt, at least one prompt. An image is one placeholder."""
    params: SamplingParams
    prompt_field: str = "messages"
    """The field of the request that the prompts are from."""
    images: tuple[Chunk, ...] = ()
    """The images of the only prompt, in order."""
    stops: tuple[str, ...] = ()
    """Stop strings, which are not part of the text."""
    num_choices: int = 1
    """Samples of each prompt."""
    top_logprobs: int = 0
    streams: bool = False
    offered: Sequence[Function] | None = None
    """The tools that the model may call; None if the answer is a text, as of completions."""
    separates_reasoning: bool = False
    """Whether reasoning is apart from the text, also if the answer is no JSON."""
    rule: AnswerRule | None = None
    """The forms that the answer may have; None for any text."""
    echoed: Sequence[str] | None = None
    """The text of each prompt, which the answer begins with; None if it does not."""
    scores_prompts: bool = False
    """Whether the answer has the logprobs of the prompts."""
    samples_nothing: bool = False
    """Whether the one token that is sampled for each choice is left out of the answer."""

    @property
    def is_reported_whole(self) -> bool:
        """Whether tokens wait for the end of the sample: those of prompts come with it."""
        return self.echoed is not None or self.samples_nothing

    def reader(self, text: ChatText) -> CallReader | None:
        """Return what finds the calls in one answer; None if all of it is text."""
        return None if self.offered is None else text.reader(self.offered)

    def thoughts(self, text: ChatText, prompt: Sequence[int]) -> ThoughtSplitter | None:
        """Return what separates the reasoning of an answer to a prompt; None if it is text.

        Reasoning before calls is separated even if it is text: calls that it drafts are not made.
        """
        is_json = self.rule is not None and self.rule.json_schema is not None
        is_apart = is_json or self.separates_reasoning
        if not is_apart and not self.offered:
            return None
        return ThoughtSplitter(text.reasoning_after(prompt), is_text=not is_apart)


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a finished request."""

    prompt: int
    sampled: int
    cached: int
    """Prompt tokens that were not computed again."""


@dataclass(slots=True, eq=False)
class Choice:
    """One sample: its tokens as they arrive, and their text."""

    text: ChatText
    prompt: Sequence[int]
    ends: Collection[int]
    """Tokens that end a sample, and have no text."""
    stops: tuple[str, ...]
    reader: CallReader | None = None
    """Finds its calls."""
    thoughts: ThoughtSplitter | None = None
    """Separates its reasoning."""
    tokens: list[SampledToken] = field(default_factory=list)
    has_calls: bool = False
    is_complete: bool = False
    """Whether a stop rule ended it, after `finish`; False for one that reached its length."""
    _shown: ShownText = field(init=False)

    def __post_init__(self) -> None:
        self._shown = ShownText(self.text, self.prompt, self.ends, self.stops)

    def add(self, token: SampledToken) -> list[Part]:
        """Append a token; return the text and the calls that have become certain."""
        self.tokens.append(token)
        return self._parsed(self._shown.add(token.token))

    def finish(self, *, is_complete: bool) -> list[Part]:
        """Return the rest of the text and the calls.

        Args:
            is_complete: whether a stop rule ended the sample.
        """
        self.is_complete = is_complete
        parts = self._parsed(self._shown.finish())
        rest = [] if self.thoughts is None else self.thoughts.finish()
        parts += [each for part in rest for each in self._with_calls(part)]
        if self.reader is not None:
            parts += self._marked(self.reader.finish())
        return parts

    @property
    def shown(self) -> list[SampledToken]:
        """Its tokens without the one that ends it."""
        is_ended = bool(self.tokens) and self.tokens[-1].token in self.ends
        return self.tokens[:-1] if is_ended else self.tokens

    @property
    def found_stop(self) -> str | None:
        """The stop string that ended it; None if something else did."""
        return self._shown.found_stop

    def _parsed(self, text: str) -> list[Part]:
        texts = [text] if self.thoughts is None else self.thoughts.add(text)
        return [each for part in texts for each in self._with_calls(part)]

    def _with_calls(self, text: str) -> list[Part]:
        if isinstance(text, Thought) and self.thoughts is not None and self.thoughts.is_text:
            return [str(text)]
        if self.reader is None or isinstance(text, Thought) or not text:
            return [text] if text else []
        return self._marked(self.reader.add(text))

    def _marked(self, parts: list[Part]) -> list[Part]:
        self.has_calls = self.has_calls or any(isinstance(part, ToolCall) for part in parts)
        return parts


def read_object(body: bytes) -> dict[str, Any]:
    """Return a JSON object, without the fields that are null.

    Raises:
        InvalidRequest: the body is something else.
    """
    content = read_body(body)
    if not isinstance(content, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return {name: value for name, value in content.items() if value is not None}


def read_fields(
    model: type[ModelT],
    content: Mapping[str, Any],
    *,
    ignored: Collection[str],
    neutral: Mapping[str, Collection[Any]],
) -> ModelT:
    """Read the fields of a request; those that would change its meaning unseen are rejected.

    Args:
        model: the fields that are understood.
        content: the request, without null fields.
        ignored: fields that do not change the answer.
        neutral: fields that are not supported, and their values that mean what is done anyway.

    Raises:
        InvalidRequest: a field is unknown, has a value that is not supported, or is invalid.
    """
    for name, value in content.items():
        if name in model.model_fields or name in ignored:
            continue
        if name not in neutral:
            raise InvalidRequest(f"{name[:80]}: this server does not support it; leave it out")
        if value not in neutral[name]:
            kept = ", ".join(orjson.dumps(each).decode() for each in neutral[name])
            raise InvalidRequest(
                f"{name}: this server does not support it; leave it out"
                + (f", or send {kept}" if kept else "")
            )
    known = {name: value for name, value in content.items() if name in model.model_fields}
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise InvalidRequest(describe(error)) from None


def effort_options(effort: str | None, text: ChatText) -> dict[str, Any]:
    """Return the variable of the chat template that says how much to reason, if any.

    Args:
        effort: how much the request wants; None if it does not say.
        text: the texts of the model.

    Raises:
        InvalidRequest: the template does not use the variable.
    """
    if effort is None:
        return {}
    if not text.uses("reasoning_effort"):
        raise InvalidRequest(
            "reasoning_effort: the chat template of this model has no variable reasoning_effort, so"
            f" that {effort!r} would change nothing; leave it out"
        )
    return {"reasoning_effort": effort}
