"""`make demo`: three examples against a running server, with live progress and a plot.

1. supervised fine-tuning on pig latin; 2. a policy-gradient loop; 3. a checkpoint that resumes
after a restart of the server.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import common
import matplotlib as mpl
import tinker
from pig_latin import PROBES, PigLatin, pig_latin
from policy_gradient import GROUP_SIZE, PolicyGradient
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tinker import types

mpl.use("Agg")
import matplotlib.pyplot as plt

SUPERVISED_STEPS, POLICY_STEPS, RESUMED_STEPS = 12, 12, 3
PLOT = Path("demo-results.png")
console = Console()


def watch(title: str, label: str, values: Iterator[float], steps: int) -> list[float]:
    """Show each value as it arrives and return all of them."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[value]}"),
        TimeElapsedColumn(),
    )
    seen = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=steps, value="")
        for value in values:
            seen.append(value)
            progress.update(task, advance=1, value=f"{label} {value:.3f}")
    return seen


def supervised(client: tinker.ServiceClient) -> PigLatin:
    console.rule("1. Supervised fine-tuning: pig latin")
    run = PigLatin(client)
    before = run.answers()
    watch("training", "loss", run.train(SUPERVISED_STEPS), SUPERVISED_STEPS)
    after = run.answers()
    for word in PROBES:
        console.print(f"  {word}: {before[word]!r} -> {after[word]!r} (wanted {pig_latin(word)!r})")
    if run.losses[-1] > 0.5 * run.losses[0] or after["banana"] != pig_latin("banana"):
        sys.exit("The model did not learn pig latin.")
    return run


def policy_gradient(client: tinker.ServiceClient) -> PolicyGradient:
    console.rule(f"2. Reinforcement learning: name a colour ({GROUP_SIZE} samples a step)")
    run = PolicyGradient(client)
    watch("training", "reward", run.train(POLICY_STEPS), POLICY_STEPS)
    first, last = sum(run.rewards[:3]) / 3, sum(run.rewards[-3:]) / 3
    console.print(f"  mean reward: {first:.2f} at first, {last:.2f} at last")
    if last < first + 0.3:
        sys.exit("The reward did not rise.")
    return run


def step_losses(training: tinker.TrainingClient, data: list[types.Datum]) -> list[float]:
    losses = []
    for _ in range(RESUMED_STEPS):
        step = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        losses.append(step.result().metrics["loss:sum"])
    return losses


def resume(run: PigLatin) -> tuple[list[float], list[float]]:
    console.rule("3. Save, restart the server, resume")
    path = run.training.save_state("demo", overwrite=True).result().path
    console.print(f"  saved {path}")
    uninterrupted = step_losses(run.training, run.data)
    restart_server()
    client = tinker.ServiceClient()
    training = client.create_training_client_from_state_with_optimizer(path).result()
    resumed = step_losses(training, run.data)
    for one, other in zip(uninterrupted, resumed, strict=True):
        console.print(f"  loss without restart {one!r}, resumed {other!r}")
    if resumed != uninterrupted:
        sys.exit("The resumed run diverged from the uninterrupted one.")
    console.print("  identical losses")
    return uninterrupted, resumed


def restart_server() -> None:
    """Restart the local server and its heads (SIGHUP)."""
    pid_file = Path(os.environ.get("TINKERCLOUD_STATE_DIR", ".run")) / "server.pid"
    if not pid_file.exists():
        sys.exit(
            f"{pid_file} is missing: run the demo in the folder in which `make run` was started."
        )
    pid = int(pid_file.read_text().split()[0])  # the next line is the URL
    console.print(f"  restarting the server (process {pid})")
    os.kill(pid, signal.SIGHUP)
    while common.is_healthy():
        time.sleep(0.05)
    common.wait_until_healthy()


def plot(run: PigLatin, policy: PolicyGradient, resumed: tuple[list[float], list[float]]) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    axes[0].plot(run.losses, marker="o")
    axes[0].set(title="Pig latin", xlabel="step", ylabel="loss per token")
    axes[1].plot(policy.rewards, marker="o", color="tab:green")
    axes[1].set(title="Naming a colour", xlabel="step", ylabel="mean reward", ylim=(-0.05, 1.05))
    axes[2].plot(resumed[0], marker="o", label="without restart")
    axes[2].plot(resumed[1], marker="x", linestyle="--", label="resumed after restart")
    axes[2].set(title="Resuming", xlabel="step after the save", ylabel="loss")
    axes[2].legend()
    figure.savefig(PLOT, dpi=120)
    console.print(f"Plot: {PLOT}")


def main() -> None:
    common.wait_until_healthy()
    common.ensure_key()
    client = tinker.ServiceClient()
    run = supervised(client)
    policy = policy_gradient(client)
    plot(run, policy, resume(run))


main()
