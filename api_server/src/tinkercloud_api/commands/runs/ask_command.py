"""`tinkercloud ask`: one question to a model, or to a base model and what was trained of it."""

import json
from typing import Annotated, Any

import typer

from tinkercloud_api.commands.common.shared import (
    ApiKey,
    BaseUrl,
    Json,
    fail,
    request,
    say_line,
    show,
)
from tinkercloud_api.commands.model_commands import wait_until_loaded
from tinkercloud_api.config.readable import printable
from tinkercloud_api.console.questions import PATHS, Kind, answer_of, body_of

_COLUMNS = ["token", "logprob"]


def ask_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Base model, path of a checkpoint for sampling, or id of a run."
        ),
    ],
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT",
            help="The question. - reads it from standard input, without a line break at its end.",
        ),
    ],
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    compare: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Ask this model too, and print its answer after it."),
    ] = None,
    kind: Annotated[
        Kind,
        typer.Option("--as", help="Send it as a message of a chat, or as the text to continue."),
    ] = "chat",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="Of sampling; 0 takes the most probable tokens.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The same seed gets the same answer again.")
    ] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Print the tokens of answers with their logprobs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ask a model a question and print its answer, as the page Playground of the console does.

    With --json, the answers of the OpenAI-compatible endpoint are printed as a list.
    """
    prompt = _standard_input() if text == "-" else text
    if not prompt:
        fail("TEXT: it is empty; write a question, or - and send one to standard input")
    others = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    answers = []
    for each in dict.fromkeys([model] if compare is None else [model, compare]):
        wait_until_loaded(each, api_key, base_url)
        body = body_of(kind, prompt, model=each, **others)
        answers.append(request("POST", base_url, api_key, PATHS[kind], body))
        if not as_json:
            if compare is not None:
                say_line(f"{each}:")
            _print_answer(kind, answers[-1], with_tokens=logprobs)
    if as_json:
        typer.echo(json.dumps(answers))


def _print_answer(kind: Kind, content: dict[str, Any], *, with_tokens: bool) -> None:
    answer, tokens = answer_of(kind, content)
    typer.echo(printable(answer, kept="\n\t"))
    if with_tokens:
        rows = [
            {"token": json.dumps(token, ensure_ascii=False), "logprob": f"{logprob:.5g}"}
            for token, logprob in tokens
        ]
        show(rows, _COLUMNS, as_json=False)


def _standard_input() -> str:
    content = typer.get_binary_stream("stdin").read()
    try:
        return content.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        fail(f"TEXT: standard input is not UTF-8 ({error}); convert it, for example with iconv")
