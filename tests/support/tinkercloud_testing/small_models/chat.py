"""Tiny models with a chat template: a random one, and two that say given texts."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tinkercloud_testing.cluster.image_build.programs import ROOT
from tinkercloud_testing.small_models.models import (
    EOS_TOKEN_ID,
    byte_tokenizer,
    save,
    smollm2,
    tiny_llama,
)

CHAT_MODEL = "tiny/chat"
SAYING_MODEL = "tiny/saying"
CHANNEL_MODEL = "tiny/channels"
_TEMPLATE = """
{%- if tools %}{{ '<tools>' }}{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}
{{- 'Answer with <tool_call>.' }}{%- endif %}
{%- for message in messages %}{{ message.role + ': ' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
{{- '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{%- endif %}"""
_TURN = "{{- '<|im_start|>assistant\\n' }}"
_TURN_AFTER_TOOLS = (
    "{{- '<|im_start|>assistant' + (':' if messages[-1].role == 'tool' else '\\n') }}"
)
"""The end of a prompt, which is another one after the response of a tool."""
_POSITIONS = 1 << 17
SAYING_TEMPLATE = _TEMPLATE.replace("'assistant: '", "messages[-1].content[-1]")
"""Ends with the last character of the last message."""


def a_chat_model(folder: Path, positions: int = 512) -> Path:
    """Write a random model whose template names roles in plain text, and return its folder.

    Args:
        folder: where to write it.
        positions: its context length.
    """
    save(tiny_llama(positions=positions), folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def a_saying_model(
    folder: Path,
    texts: Mapping[str, Sequence[str]],
    special: Sequence[str],
    template: str = SAYING_TEMPLATE,
) -> Path:
    """Write a model that says given texts at temperature 0, and return its folder.

    Each token has one successor. What it says is chosen by the last character of the prompt, which
    in a chat is that of the last message.

    Args:
        folder: where to write it.
        texts: by the last character of the prompt, the tokens of the text, each in one text only;
            single characters are the tokens of their bytes.
        special: those that are special tokens.
        template: its chat template, in which the prompt ends as in `SAYING_TEMPLATE`.
    """
    tokenizer = byte_tokenizer()
    pieces = [piece for text in texts.values() for piece in text if len(piece) > 1]
    tokenizer.add_tokens(
        [AddedToken(each, special=each in special, normalized=False) for each in pieces]
    )
    tokenizer.chat_template = template
    size = len(tokenizer)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=size + size % 2,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=EOS_TOKEN_ID,
            pad_token_id=None,
        )
    )
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_().fill_diagonal_(1)
        model.lm_head.weight.zero_()
        for start, text in texts.items():
            chain = tokenizer.encode(start + "".join(text))
            for token, following in pairwise([*chain, EOS_TOKEN_ID]):
                model.lm_head.weight[following, token] = 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def an_agents_model(folder: Path, call: str, answer: str) -> Path:
    """Write a model that calls one tool and then gives one answer, and return its folder.

    Its tokens and its template are those of SmolLM2 with tools: the instructions of an agent have
    too many characters for tokens of bytes.

    Args:
        folder: where to write it.
        call: what it says to a person, in the format of Hermes.
        answer: what it says to the response of a tool.
    """
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in (call, answer)])
    template = (ROOT / "examples" / "hermes_tools.jinja").read_text()
    assert _TURN in template
    tokenizer.chat_template = template.replace(_TURN, _TURN_AFTER_TOOLS)
    tokenizer.model_max_length = _POSITIONS
    to_person, to_tool = (tokenizer.encode(each)[-1] for each in ("\n", "assistant:"))
    vocabulary = tokenizer.get_vocab()
    end = tokenizer.eos_token_id
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=_POSITIONS,
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=end,
        )
    )
    layer, embedding, head = model.model.layers[0], model.model.embed_tokens, model.lm_head
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        embedding.weight.zero_()[:, 2] = 1
        embedding.weight[[to_person, to_tool]] = torch.eye(8)[:2]
        head.weight.zero_()
        for token, direction in ((vocabulary[call], 0), (vocabulary[answer], 1), (end, 2)):
            head.weight[token, direction] = 50
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
