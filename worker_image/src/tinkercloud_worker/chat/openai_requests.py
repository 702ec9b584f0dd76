"""Requests of OpenAI's chat completions and completions.

https://platform.openai.com/docs/api-reference/chat/create
https://platform.openai.com/docs/api-reference/completions/create
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from tinkercloud_protocol.requests.sampling_requests import LogitParams, SamplingParams
from tinkercloud_protocol.wire import exact_json
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import Items, Name, WireModel, few_entries
from tinkercloud_protocol.wire.shown import shown
from tinkercloud_worker.chat.chat_images import content_for_template, images_of
from tinkercloud_worker.chat.conversation import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    Asked,
    Effort,
    effort_options,
    read_fields,
    read_object,
)
from tinkercloud_worker.chat.rules.answer_rules import ANY_OBJECT, Function, ToolChoice, rule_of
from tinkercloud_worker.chat.text import ChatText

IGNORED = frozenset(
    {
        *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
        *("service_tier", "store", "user"),
    }
)
"""Fields that do not change the answer of this server."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "verbosity": ("medium",),
    "best_of": (1,),
    "suffix": ("",),
    # Of vLLM and SGLang, whose clients send their defaults.
    **dict.fromkeys(("bad_words", "documents", "logits_processors", "stop_token_ids"), ([],)),
    **dict.fromkeys(("mm_processor_kwargs", "vllm_xargs"), ({},)),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "use_beam_search"), (False,)),
    **dict.fromkeys(("continue_final_message", "no_stop_trim"), (False,)),
    **dict.fromkeys(("return_hidden_states", "return_token_ids"), (False,)),
    "return_tokens_as_token_ids": (False,),
    **dict.fromkeys(("detokenize", "include_reasoning", "skip_special_tokens"), (True,)),
    "spaces_between_special_tokens": (True,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "priority": (0,),
}
_CHAT_NEUTRAL = {
    **_NEUTRAL,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "echo": (False,),
}
_COMPLETION_NEUTRAL = {**_NEUTRAL, "add_special_tokens": (True,)}
_MAX_PROMPTS = 128
_MAX_ECHOED_VALUES = 1 << 21
"""Logprobs of prompts in one answer, about 40 bytes each."""


class StreamOptions(WireModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class _Sampling(LogitParams):
    """The fields that both kinds of request have.

    Those of `LogitParams` are OpenAI's, except `min_p` and `repetition_penalty`.
    """

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Items[str] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Not OpenAI's: as in asample."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(given)

    def params(self, max_tokens: int | None) -> SamplingParams:
        """Return how to sample."""
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self.seed,
            # An empty list would disable the model's end tokens too.
            stop=list(self.stops) or None,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            **{name: getattr(self, name) for name in LogitParams.model_fields},
        )


class _FunctionCall(WireModel):
    name: Name
    arguments: str = "{}"


class _ToolCall(WireModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: _FunctionCall


class OpenAIMessage(WireModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Items[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def for_template(self, index: int) -> dict[str, Any]:
        """Return the message as chat templates of transformers receive it.

        Raises:
            InvalidRequest: it has content other than text and images, or a call whose arguments
                are no JSON object.
        """
        role = "system" if self.role == "developer" else self.role
        content = content_for_template(self.content, f"messages.{index}.content")
        message: dict[str, Any] = {"role": role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(
                            call.function.arguments,
                            f"messages.{index}.tool_calls.{number}.function.arguments",
                        ),
                    },
                }
                for number, call in enumerate(self.tool_calls)
            ]
        return message


def _arguments(text: str, where: str) -> dict[str, Any]:
    """Return the arguments of a call as templates expect them. Clients also send "" for none."""
    if not text.strip():
        return {}
    try:
        content = exact_json.read(text)
    except ValueError as error:
        raise InvalidRequest(f"{where}: must be a JSON object in a string: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"{where}: must be a JSON object in a string, got {shown(content)}")
    return content


class _Function(WireModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OpenAITool(WireModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Function

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates receive it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class _NamedFunction(WireModel):
    name: Name


class _NamedTool(WireModel):
    type: Literal["function"]
    function: _NamedFunction


def _a_choice(choice: object) -> object:
    """Return a value unless it is no choice of tools; errors of a union name each alternative."""
    names_function = (
        isinstance(choice, dict)
        and choice.get("type") == "function"
        and isinstance(choice.get("function"), dict)
        and isinstance(choice["function"].get("name"), str)
    )
    if names_function or choice in ("auto", "none", "required"):
        return choice
    raise ValueError(
        'must be "auto", "none", "required" or {"type": "function", "function": {"name": NAME}}'
    )


class _JsonSchema(WireModel):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: dict[str, Any] = Field(alias="schema")


class _ResponseFormat(WireModel):
    """The form of the text of an answer. Schemas are enforced, whether `strict` is set or not."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "_ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: required with type json_schema, and only then")
        return self

    @property
    def schema_of_text(self) -> Mapping[str, Any] | None:
        """The JSON schema of the text; None if it may be any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return ANY_OBJECT if self.type == "json_object" else None


TemplateOptions = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=128)],
        Annotated[str, StringConstraints(max_length=1 << 14)]
        | bool
        | Annotated[int, Field(ge=-(2**31), lt=2**31)]
        | Annotated[float, Field(ge=-(2**31), lt=2**31)],
    ],
    BeforeValidator(few_entries),
]
"""Variables of a chat template, which may print them or count to them."""


class ChatCompletionRequest(_Sampling):
    """POST chat/completions."""

    messages: Annotated[Items[OpenAIMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: Annotated[Items[OpenAITool], Field(max_length=1024)] = []  # noqa: RUF012 - pydantic copies it
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | _NamedTool, BeforeValidator(_a_choice)
    ] = "auto"
    parallel_tool_calls: bool = True
    response_format: _ResponseFormat = _ResponseFormat(type="text")
    reasoning_effort: Effort | None = None
    """A variable of chat templates, for models that reason as much as the request wants."""
    separate_reasoning: bool = False
    """Not OpenAI's: whether reasoning in `<think>` is apart from the text, also without JSON."""
    chat_template_kwargs: TemplateOptions = {}  # noqa: RUF012 - as above
    """Not OpenAI's: variables of the chat template, such as `enable_thinking`."""

    def ask(self, text: ChatText) -> Asked:
        """Return what is asked, with the conversation as tokens.

        Raises:
            InvalidRequest: the conversation or a field is not supported.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true")
        rule = rule_of(self._functions, self._choice, self.response_format.schema_of_text)
        tools = [tool.for_template for tool in self.tools if self.tool_choice != "none"]
        messages = [message.for_template(index) for index, message in enumerate(self.messages)]
        images = [
            image
            for index, message in enumerate(self.messages)
            for image in images_of(message.content, f"messages.{index}.content")
        ]
        prompt = text.render(messages, tools, self._template_options(text))
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return Asked(
            model=self.model,
            prompts=[prompt],
            images=tuple(images),
            params=self.params(min(limits, default=None)),
            stops=self.stops,
            num_choices=self.n,
            top_logprobs=self.top_logprobs,
            streams=self.stream,
            offered=() if self.tool_choice == "none" else self._functions,
            separates_reasoning=self.separate_reasoning,
            rule=rule,
        )

    def _template_options(self, text: ChatText) -> dict[str, Any]:
        """Return the variables of the chat template.

        Raises:
            InvalidRequest: one of them is not a template's own.
        """
        options = template_options(self.chat_template_kwargs)
        effort = effort_options(self.reasoning_effort, text)
        if {**effort, **options} != {**options, **effort}:
            raise InvalidRequest(
                f"reasoning_effort: {self.reasoning_effort!r} differs from the one in"
                " chat_template_kwargs; send one of them"
            )
        return {**options, **effort}

    @property
    def _choice(self) -> ToolChoice:
        choice, is_one_call = self.tool_choice, not self.parallel_tool_calls
        if isinstance(choice, _NamedTool):
            return ToolChoice("named", choice.function.name)
        return ToolChoice(choice, is_one_call=is_one_call)

    @property
    def _functions(self) -> list[Function]:
        functions = enumerate(tool.function for tool in self.tools)
        return [
            Function(
                each.name,
                each.parameters or ANY_OBJECT,
                f"tools.{index}.function.parameters",
                is_strict=bool(each.strict),
            )
            for index, each in functions
        ]


_OWN_OPTIONS = frozenset(
    {
        *("conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("load_audio_from_video", "processor_kwargs", "messages"),
    }
)
"""Arguments of `apply_chat_template` that are not variables of a template."""


def template_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return variables for the chat template.

    Raises:
        InvalidRequest: one of them is not a template's own.
    """
    if taken := sorted(_OWN_OPTIONS & options.keys()):
        raise InvalidRequest(
            f"chat_template_kwargs: {', '.join(taken)} can't be set; send variables of the model's"
            " chat template, such as enable_thinking"
        )
    return options


class CompletionRequest(_Sampling):
    """POST completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0 samples nothing, which only makes sense with `echo`."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    """Whether the prompt comes before the sample, with its own logprobs if there are any."""

    def ask(self, text: ChatText) -> Asked:
        """Return what is asked, with the prompts as tokens.

        Raises:
            InvalidRequest: there are no prompts or too many, or a token is not of the vocabulary.
        """
        given = self._prompts()
        for prompt in given:
            if not isinstance(prompt, str):
                text.check_tokens(prompt, "prompt")
        prompts = [self._tokens(prompt, text) for prompt in given]
        if not prompts or not all(prompts):
            raise InvalidRequest("prompt: must not be empty; send at least one token")
        if len(prompts) > _MAX_PROMPTS:
            raise InvalidRequest(f"prompt: at most {_MAX_PROMPTS} prompts, got {len(prompts)}")
        echoed = [each if isinstance(each, str) else text.decode(each) for each in given]
        scores_prompts = self.echo and self.logprobs is not None
        if scores_prompts:
            self._check_size(sum(map(len, prompts)))
        most = 16 if self.max_tokens is None else self.max_tokens
        return Asked(
            model=self.model,
            prompts=prompts,
            params=self.params(max(most, 1)),
            prompt_field="prompt",
            stops=self.stops,
            num_choices=self.n,
            top_logprobs=self.logprobs or 0,
            streams=self.stream,
            echoed=echoed if self.echo else None,
            scores_prompts=scores_prompts,
            samples_nothing=most == 0,
        )

    def _check_size(self, num_tokens: int) -> None:
        values = self.n * num_tokens * ((self.logprobs or 0) + 1)
        if values > _MAX_ECHOED_VALUES:
            raise InvalidRequest(
                f"prompt: echo with logprobs has {values} logprobs for these prompts; at most"
                f" {_MAX_ECHOED_VALUES} are returned. Send fewer or shorter prompts, or lower n or"
                " logprobs"
            )

    def _prompts(self) -> list[str | list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)  # type: ignore[arg-type]  # all entries have the same type

    @staticmethod
    def _tokens(prompt: str | list[int], text: ChatText) -> list[int]:
        return text.encode(prompt) if isinstance(prompt, str) else prompt


def read_chat(body: bytes) -> ChatCompletionRequest:
    """Read a request for a chat completion.

    Raises:
        InvalidRequest: a field is invalid or not supported.
    """
    content = read_object(body)
    return read_fields(ChatCompletionRequest, content, ignored=IGNORED, neutral=_CHAT_NEUTRAL)


def read_completion(body: bytes) -> CompletionRequest:
    """Read a request for a completion.

    Raises:
        InvalidRequest: a field is invalid or not supported.
    """
    content = read_object(body)
    return read_fields(CompletionRequest, content, ignored=IGNORED, neutral=_COMPLETION_NEUTRAL)
