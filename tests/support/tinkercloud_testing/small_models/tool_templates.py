"""Chat templates of public families, as far as they write tools, calls and their results."""

from transformers import PreTrainedTokenizerFast

_TOOLS = "{%- for tool in tools or [] %}{{ tool | tojson }}{{ '\\n' }}{%- endfor %}"

LLAMA = (
    """{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Environment: ipython\\n' }}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and' }}
{{- ' its value}.\\n' }}"""
    + _TOOLS
    + """{{ '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}
{{- tool_call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
)
"""Llama 3.1 and 3.3; `<|python_tag|>` is in their vocabulary."""

_MISTRAL = """{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}CALLS{{ eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + message.tool_call_id + '|' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ message.content + eos_token }}{%- endif %}{%- endfor %}"""
_ID_CHECK = """{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"""

MISTRAL_LIST = _MISTRAL.replace(
    "CALLS",
    "{{ '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}"
    + _ID_CHECK
    + """{%- set out = call.function | tojson %}{{ out[:-1] + ', "id": "' + call.id + '"}' }}
{{- ', ' if not loop.last else ']' }}{%- endfor %}""",
)
"""Mistral 7B v0.3 and Mistral Nemo."""

MISTRAL_NAMED = _MISTRAL.replace(
    "CALLS",
    "{%- for call in message.tool_calls %}"
    + _ID_CHECK
    + """{{ '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id }}
{{- '[ARGS]' + call.function.arguments | tojson }}{%- endfor %}""",
)
"""Mistral Small 3.2; later ones leave the id out."""

QWEN_XML = (
    "{%- if tools %}{{ '# Tools\\n' }}"
    + _TOOLS
    + """{{ 'Reply in the format:\\n<tool_call>\\n<function=example_function_name>\\n' }}
{{- '<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n</function>\\n</tool_call>\\n' }}
{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for tool_call in message.tool_calls or [] %}{%- set tool_call = tool_call.function %}
{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{%- for args_name, args_value in tool_call.arguments | items %}
{{- '<parameter=' + args_name + '>\\n' }}
{{- args_value if args_value is string else args_value | tojson }}{{ '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
)
"""Qwen 3.5 and Qwen 3 Coder, without reasoning."""

HARMONY = (
    "{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort | default('medium') }}"
    "{{- '<|end|>' }}"
    "{%- if tools %}{{ '<|start|>developer<|message|># Tools\\n' }}"
    + _TOOLS
    + """{{ '<|end|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.content and message.thinking %}
{{- raise_exception('Cannot pass both content and thinking in a message with tool calls!') }}
{%- elif message.content or message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' }}
{{- message.thinking or message.content }}{{ '<|end|>' }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' }}
{{- message.content + '<|end|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}{#- <|return|> #}"""
)
"""gpt-oss."""

SPECIAL_TOKENS = {
    LLAMA: ("<|python_tag|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    MISTRAL_LIST: ("[TOOL_CALLS]", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    MISTRAL_NAMED: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[INST]", "[/INST]"),
    QWEN_XML: ("<tool_call>", "</tool_call>"),
    HARMONY: (
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
}
"""Special tokens of each family."""


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the tokens of a text, in which `<|end|>` is not the token that ends samples."""
    first, *others = text.split("<|end|>")
    parts = [first, *(part for each in others for part in ("<|end", "|>" + each))]
    return [token for part in parts for token in tokenizer.encode(part)]
