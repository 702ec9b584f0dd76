"""A tiny model with a chat template."""

from pathlib import Path

from tinkercloud_testing.models import byte_tokenizer, save, tiny_llama

CHAT_MODEL = "tiny/chat"
_TEMPLATE = """
{%- if tools %}{{ '<tools>' }}{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}
{{- 'Answer with <tool_call>.' }}{%- endif %}
{%- for message in messages %}{{ message.role + ': ' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
{{- '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{%- endif %}"""


def a_chat_model(folder: Path) -> Path:
    """Write a random model whose template names roles in plain text, and return its folder."""
    save(tiny_llama(), folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
