"""The formats of tool calls that the server knows."""

from collections.abc import Sequence

from tinkercloud_worker.chat.tool_formats.harmony import Harmony
from tinkercloud_worker.chat.tool_formats.hermes import Hermes
from tinkercloud_worker.chat.tool_formats.llama import Llama
from tinkercloud_worker.chat.tool_formats.mistral import MistralList, MistralNamed
from tinkercloud_worker.chat.tool_formats.qwen_xml import QwenXml
from tinkercloud_worker.chat.tool_formats.tool_format import ToolFormat

HERMES = Hermes()
FORMATS: Sequence[ToolFormat] = (
    HERMES,
    QwenXml(),
    MistralList(),
    MistralNamed(),
    Harmony(),
    Llama(),
)


def format_of(template: str) -> ToolFormat | None:
    """Return the format in which a chat template writes calls; None if it is not known."""
    return next((each for each in FORMATS if each.is_of(template)), None)
