"""`python -m tinkercloud.demo`: the program of `tinkercloud demo`, which sets its environment.

1. supervised fine-tuning on pig latin; 2. a policy-gradient loop; 3. a checkpoint that resumes
after a restart of the server.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import tinker
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tinker import types

from tinkercloud.demo import local_server
from tinkercloud.demo.pig_latin import PROBES, PigLatin, pig_latin
from tinkercloud.demo.policy_gradient import GROUP_SIZE, PolicyGradient
from tinkercloud_api.commands.common.progress import note_output, waiting

mpl.use("Agg")
import matplotlib.pyplot as plt

SUPERVISED_STEPS, POLICY_STEPS, RESUMED_STEPS = 12, 12, 3
console = Console()


@dataclass(frozen=True, slots=True)
class Options:
    """What the demo runs on."""

    model: str
    url: str
    """URL of the server."""
    state_dir: Path
    """State folder of a server on this machine, which the demo restarts."""
    plot: Path
    """File to write."""


def watch(title: str, label: str, values: Iterator[float], steps: int) -> list[float]:
    """Show each value as it arrives and return all of them."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[value]}"),
        TimeElapsedColumn(),
    )
    seen: list[float] = []
    if not console.is_terminal:
        with waiting(title):
            for value in values:
                seen.append(value)
                print(f"  {title} {len(seen)}/{steps}: {label} {value:.3f}", flush=True)
                note_output()
        return seen
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=steps, value="")
        for value in values:
            seen.append(value)
            progress.update(task, advance=1, value=f"{label} {value:.3f}")
    return seen


def supervised(run: PigLatin) -> None:
    """Teach the model pig latin, or exit if it does not learn it."""
    console.rule("1. Supervised fine-tuning: pig latin")
    with waiting("asking the model"):
        before = run.answers()
    watch("training", "loss", run.train(SUPERVISED_STEPS), SUPERVISED_STEPS)
    with waiting("asking the model again"):
        after = run.answers()
    for word in PROBES:
        console.print(f"  {word}: {before[word]!r} -> {after[word]!r} (wanted {pig_latin(word)!r})")
    if run.losses[-1] > 0.5 * run.losses[0] or after["banana"] != pig_latin("banana"):
        sys.exit("The model did not learn pig latin.")


def policy_gradient(run: PolicyGradient) -> None:
    """Raise the reward of the model, or exit if it does not rise."""
    console.rule(f"2. Reinforcement learning: name a colour ({GROUP_SIZE} samples a step)")
    watch("training", "reward", run.train(POLICY_STEPS), POLICY_STEPS)
    first, last = sum(run.rewards[:3]) / 3, sum(run.rewards[-3:]) / 3
    console.print(f"  mean reward: {first:.2f} at first, {last:.2f} at last")
    if last < first + 0.3:
        sys.exit("The reward did not rise.")


@waiting(f"taking {RESUMED_STEPS} steps")
def step_losses(training: tinker.TrainingClient, data: list[types.Datum]) -> list[float]:
    """Return the losses of a few more steps."""
    losses = []
    for _ in range(RESUMED_STEPS):
        step = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        losses.append(step.result().metrics["loss:sum"])
    return losses


def resume(run: PigLatin, options: Options) -> tuple[list[float], list[float]]:
    """Return the losses of steps after a save: without a restart, and resumed after one."""
    console.rule("3. Save, restart the server, resume")
    with waiting("saving"):
        path = run.training.save_state("demo", overwrite=True).result().path
    console.print(f"  saved {path}")
    uninterrupted = step_losses(run.training, run.data)
    console.print("  restarting the server")
    with waiting("restarting the server"):
        is_restarted = local_server.restart(options.url, options.state_dir)
    if not is_restarted:
        console.print(
            f"  no restart: the server at {options.url} does not use the state folder"
            f" {options.state_dir}; the run resumes as a new one"
        )
    console.print("  resuming, as soon as the server has loaded its model")
    with waiting("resuming"):
        client = tinker.ServiceClient()
        training = client.create_training_client_from_state_with_optimizer(path).result()
    resumed = step_losses(training, run.data)
    for one, other in zip(uninterrupted, resumed, strict=True):
        console.print(f"  loss of the first run {one!r}, resumed {other!r}")
    if resumed != uninterrupted:
        sys.exit("The resumed run diverged from the first one.")
    console.print("  identical losses")
    return uninterrupted, resumed


def plot(
    run: PigLatin, policy: PolicyGradient, resumed: tuple[list[float], list[float]], file: Path
) -> None:
    """Write a picture of all three examples."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    axes[0].plot(run.losses, marker="o")
    axes[0].set(title="Pig latin", xlabel="step", ylabel="loss per token")
    axes[1].plot(policy.rewards, marker="o", color="tab:green")
    axes[1].set(title="Naming a colour", xlabel="step", ylabel="mean reward", ylim=(-0.05, 1.05))
    axes[2].plot(resumed[0], marker="o", label="first run")
    axes[2].plot(resumed[1], marker="x", linestyle="--", label="resumed")
    axes[2].set(title="Resuming", xlabel="step after the save", ylabel="loss")
    axes[2].legend()
    figure.savefig(file, dpi=120)
    console.print(f"Plot: {file}")


def check_model(options: Options) -> None:
    """Exit if the server does not serve the model, or does not know the API key."""
    model = options.model
    try:
        served = tinker.RestClient().get_server_capabilities().result().supported_models
    except tinker.AuthenticationError:
        sys.exit(
            f"The server at {options.url} does not know the API key. If it uses another state"
            f" folder than {options.state_dir}, name that with --state-dir, or set TINKER_API_KEY"
            " to a key of it."
        )
    names = [each.model_name for each in served if each.model_name is not None]
    if model not in names:
        sys.exit(
            f"--model: the server does not serve {model!r}; it serves"
            f" {', '.join(names) or 'no models'}. The examples are made for small chat models."
        )


def parsed() -> Options:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tinkercloud.demo")
    parser.add_argument("--model", required=True)
    parser.add_argument("--plot", type=Path, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    given = parser.parse_args()
    return Options(given.model, os.environ["TINKER_BASE_URL"], given.state_dir, given.plot)


def main() -> None:
    """Run the three examples."""
    options = parsed()
    with waiting("looking for the server and its model"):
        local_server.wait_until_healthy(options.url)
        local_server.ensure_key(options.state_dir)
        check_model(options)
    with waiting("creating a training run"):
        client = tinker.ServiceClient()
        pig = PigLatin(client, options.model)
    if link := local_server.console_link(pig.training.model_id):
        # A link with a line break inside is of no use.
        console.print(f"Watch it learn: {link}", soft_wrap=True)
    supervised(pig)
    with waiting("creating another training run"):
        policy = PolicyGradient(client, options.model)
    policy_gradient(policy)
    plot(pig, policy, resume(pig, options), options.plot)


main()
