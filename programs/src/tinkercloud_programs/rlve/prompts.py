"""Prompts: how a problem is shown to the model, as tokens."""

from typing import Any

from tinkercloud_protocol.programs.rlve import RlveConfig

_INSTRUCTIONS = {
    "<answer></answer>": "Write the final answer between <answer> and </answer>.",
    "\\boxed{}": "Write the final answer as \\boxed{answer}.",
}
_CONVERSATION = (
    "A conversation between a user and an assistant. The user asks a question, and the assistant"
    " first thinks about it and then answers it.\nUser: {problem}\n{instruction}\nAssistant:"
)


def prompt_tokens(tokenizer: Any, problem: str, config: RlveConfig) -> list[int]:  # noqa: ANN401 - of transformers
    """Return the tokens of a problem's prompt.

    Raises:
        ValueError: the chat template is wanted, and the tokenizer has none.
    """
    instruction = _INSTRUCTIONS[config.answer_marker_type]
    if config.custom_prompt_preprocessor == "TinyZero":
        text = _CONVERSATION.format(problem=problem, instruction=instruction)
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "custom_prompt_preprocessor: the model's tokenizer has no chat template; use 'TinyZero'"
        )
    messages = [{"role": "user", "content": f"{problem}\n{instruction}"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
