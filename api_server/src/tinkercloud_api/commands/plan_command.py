"""`tinkercloud plan`: how to train and sample a model on given GPUs."""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tinkercloud_api.commands.common.progress import waiting
from tinkercloud_api.commands.common.shared import Json, fail

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tinkercloud_api.admin.plan_files import Wanted

PoolSlots = Annotated[
    int, typer.Option(min=1, max=1000, help="Runs that share a cluster of a pool. 1: no pool.")
]
Sessions = Annotated[
    int, typer.Option(min=1, max=4096, help="Sessions that divide the GPUs equally.")
]


def plan_model(
    model: Annotated[
        str, typer.Argument(help="Folder in Hugging Face format, or model ID on the Hub.")
    ],
    gpus: Annotated[
        str, typer.Option(help="Number and type of GPUs, such as 8xH100, 4xA100-40 or 2x48GiB.")
    ],
    *,
    gpus_per_node: Annotated[int, typer.Option(help="Number of GPUs per node.")] = 8,
    sequence_length: Annotated[
        int | None,
        typer.Option(help="Maximum sequence length, in tokens. Default: the model's, up to 32768."),
    ] = None,
    lora_rank: Annotated[int, typer.Option(min=1, max=1024, help="Maximum LoRA rank.")] = 32,
    pool_slots: PoolSlots = 1,
    sessions: Sessions = 1,
    gpu_price: Annotated[
        float | None, typer.Option(min=0, help="Price of a GPU per hour, for the plan's price.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Plan full fine-tuning instead of LoRA.")
    ] = False,
    train_only: Annotated[
        bool, typer.Option("--train-only", help="All GPUs train; external servers sample.")
    ] = False,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Plan `tinkercloud serve` on one GPU. --json: its settings."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Plan how to train and sample a model on GPUs. --json prints a BaseModel manifest."""
    # The planner and the hub's client take a while to load, which other commands need not.
    from tinkercloud_api.admin import plan_files

    wanted = plan_files.Wanted(
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        sequence_length=sequence_length,
        lora_rank=None if full else lora_rank,
        pool_slots=pool_slots,
        sessions=sessions,
    )
    if serve and train_only:
        fail("--serve, --train-only: a server on one GPU samples itself; use one of them")
    plans = (
        plan_files.serving if serve else plan_files.training_only if train_only else plan_files.plan
    )
    try:
        with waiting(f"reading config.json of {model}"):
            plan = plans(model, wanted)
        manifest = plan_files.manifest(plan, model) if as_json else None
    except plan_files.CannotPlan as error:
        fail(f"{error}{_fewer_sessions(error, partial(plans, model), wanted)}")
    if manifest is not None:
        typer.echo(json.dumps(manifest, indent=2))
        return
    _print(plan_files.report(plan, wanted, gpu_price))
    if sessions > 1:
        typer.echo(_shares(wanted, gpu_price))


def _print(parts: "Iterable[RenderableType]") -> None:
    from rich.console import Console

    for part in parts:
        Console(emoji=False).print(part, highlight=False)


def _shares(wanted: "Wanted", gpu_price: float | None) -> str:
    """Return what one of several sessions costs, and how many GPUs none of them uses."""
    from tinkercloud_planning.gpus import parse

    fleet = parse(wanted.gpus, wanted.gpus_per_node)
    count, each = fleet.count, fleet.share(wanted.sessions).count
    used = each * wanted.sessions
    shares = f"\n{each} GPUs for each session"
    if gpu_price is not None:
        shares += f", at {gpu_price * each:.2f} an hour"
    shares += (
        f"\nhost and disk are those of one session: {wanted.sessions} sessions need as much each"
    )
    if used < count:
        shares += (
            f"\n{count - used} of {count} GPUs stay unused: each session has an equal part of a"
            " node, or whole nodes"
        )
    return shares


def _fewer_sessions(error: Exception, plans: "Callable[[Wanted], object]", wanted: "Wanted") -> str:
    """Return how many sessions would fit if so many do not."""
    from tinkercloud_api.admin.plan_files import CannotPlan
    from tinkercloud_planning.gpus import parse
    from tinkercloud_planning.refusal import DoesNotFit

    if wanted.sessions == 1 or not isinstance(error.__cause__, DoesNotFit):
        return ""
    fleet = parse(wanted.gpus, wanted.gpus_per_node)
    refused = fleet.share(wanted.sessions).count
    for sessions in range(wanted.sessions - 1, 0, -1):
        share = fleet.share(sessions).count
        if share == refused:
            continue
        with suppress(CannotPlan):
            plans(replace(wanted, sessions=sessions))
            return f" With these GPUs at most {sessions} sessions fit (--sessions {sessions})."
        refused = share
    return ""
