"""Trains a small model on one RLVE environment, on this machine's CPU: `make rlve`.

For each seed, with a server of its own:

1. A random model, all its weights, is trained to answer in the right form. Most answers are those of
   other problems, so that it rarely answers right.
2. RLVE trains it on the server. In the middle, first the program and then the session head are
   killed (SIGKILL); nobody does anything about it.

Reward, accuracy and difficulty of each step are written to docs/images/rlve.png and
benchmarks/results/rlve.json.
"""

import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import psutil
import tinker
from matplotlib.axes import Axes
from tinker import types
from transformers import AutoTokenizer

from benchmarks.shared.small_model import END, save_small_model
from tinkercloud_programs.rlve.problems import Problems
from tinkercloud_programs.rlve.prompts import prompt_tokens
from tinkercloud_protocol.programs.rlve import RlveConfig
from tinkercloud_testing.clients.sdk_steps import a_text
from tinkercloud_testing.serving.servers import Server, a_server

MODEL = "small/llama"
ENVIRONMENT = "MaxMultiplicationFixedSum"
SEEDS = (0, 1)
KILL_PROGRAM_AT, KILL_HEAD_AT = 80, 160
CONFIG: dict[str, Any] = {
    "enabled": True,
    "environment_list": [ENVIRONMENT],
    "custom_prompt_preprocessor": "ChatTemplate_NoSystemPrompt",
    "rollout_batch_size": 16,
    "n_samples_per_prompt": 8,
    "use_dynamic_sampling_filter": False,
    "over_sampling_batch_size": 16,
    "rollout_max_response_len": 12,
    "min_prompts_before_difficulty_check": 32,
    "num_rollout": 240,
    "save_every_steps": 20,
    "learning_rate": 1.5e-4,
}
WARM_UP_STEPS, WARM_UP_BATCH, WARM_UP_LEARNING_RATE = 120, 32, 2e-3
WARM_UP_DIFFICULTIES = (0, 1, 2)
WARM_UP_POOL = 600
WARM_UP_RIGHT = 0.3
"""Share of right answers."""
WINDOW = 8
"""Number of steps that each point of a smooth curve is the mean of."""
ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^step (\d+): reward (\S+), accuracy (\S+), difficulty \S+ (\d+)$", re.MULTILINE)


def answers(folder: Path) -> list[types.Datum]:
    """Return problems with answers in the right form, most of them wrong, as training data."""
    config, chance = RlveConfig(**CONFIG), random.Random(0)  # noqa: S311 - not for secrets
    problems, tokenizer = Problems(config), AutoTokenizer.from_pretrained(folder)
    chosen = [
        problems.generate(ENVIRONMENT, chance.choice(WARM_UP_DIFFICULTIES), chance)
        for _ in range(WARM_UP_POOL)
    ]
    data = []
    for problem in chosen:
        answered = problem if chance.random() < WARM_UP_RIGHT else chance.choice(chosen)
        number = next(n for n in range(10_000) if answered.verify(f"<answer>{n}</answer>").accuracy)
        prompt = prompt_tokens(tokenizer, problem.text, config)
        answer = tokenizer.encode(f"<answer>{number}</answer>{END}", add_special_tokens=False)
        weights = [0.0] * (len(prompt) - 1) + [1.0 / WARM_UP_BATCH] * len(answer)
        data.append(a_text([*prompt, *answer], weights=weights))
    return data


def warm_up(training: tinker.TrainingClient, data: Sequence[types.Datum], seed: int) -> None:
    """Teach a model the form of the answers."""
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    adam = types.AdamParams(learning_rate=WARM_UP_LEARNING_RATE)
    for step in range(1, WARM_UP_STEPS + 1):
        batch = chance.choices(data, k=WARM_UP_BATCH)
        gradient = training.forward_backward(batch, "cross_entropy")
        training.optim_step(adam).result()
        if step % 20 == 0:
            loss = gradient.result().metrics["loss:sum"]
            print(f"seed {seed}: warm-up {step}: loss {loss:.2f}", flush=True)


def kill_program(server: Server) -> None:
    """Kill the RLVE program of a server."""
    assert server.process is not None
    for child in psutil.Process(server.process.pid).children():
        if any("tinkercloud_programs" in part for part in child.cmdline()):
            child.kill()


def watched(server: Server, program_id: str) -> Iterator[dict[str, Any]]:
    """Yield what the server shows of a program until it ends."""
    while True:
        program = server.request("GET", f"/api/v1/programs/{program_id}").json()
        yield program
        if program["phase"] not in {"Pending", "Running"}:
            return
        time.sleep(0.5)


def run_program(server: Server, model_id: str, seed: int) -> dict[str, Any]:
    """Run RLVE on a model, kill its processes, and return the curve."""
    body = {"model_id": model_id, "rlve_config": CONFIG | {"seed": seed}}
    answer = server.post("programs", body)
    assert answer.status == 200, answer.body
    program_id, started = answer.json()["program_id"], time.monotonic()
    kills: list[tuple[int, str, Callable[[Server], None]]] = [
        (KILL_PROGRAM_AT, "program", kill_program),
        (KILL_HEAD_AT, "head", Server.kill_heads),
    ]
    killed: dict[str, int] = {}
    for program in watched(server, program_id):
        step = program["progress"].get("step", 0)
        if kills and step >= kills[0][0]:
            _, what, kill = kills.pop(0)
            kill(server)
            killed[what] = step
            print(f"seed {seed}: killed the {what} at step {step}", flush=True)
    text = str(server.request("GET", f"/api/v1/programs/{program_id}/logs").json()["text"])
    points = {int(step): list(map(float, rest)) for step, *rest in LINE.findall(text)}
    names = ["reward", "accuracy", "difficulty"]
    return {
        "seconds": round(time.monotonic() - started),
        "phase": program["phase"],
        "restarts": program["restarts"],
        "killed_at_step": killed,
        "steps": [
            {"step": step, **dict(zip(names, values, strict=True))}
            for step, values in sorted(points.items())
        ],
    }


def train(model: Path, data: Sequence[types.Datum], seed: int) -> dict[str, Any]:
    """Train a model with one seed, on a server of its own, and return the curve."""
    with (
        tempfile.TemporaryDirectory() as folder,
        a_server(Path(folder), {MODEL: model}) as server,
    ):
        client = server.client()
        warm = client.create_lora_training_client(base_model=MODEL, rank=0).result()
        warm_up(warm, data, seed)
        saved = warm.save_state("warm").result().path
        # Without the optimizer, whose moments are those of much larger gradients.
        training = client.create_training_client_from_state(saved).result()
        curve = run_program(server, str(training.model_id), seed)
    return {"seed": seed, **curve}


def smoothed(values: list[float]) -> list[float]:
    """Return the mean of each value and those before it, up to `WINDOW` values."""
    windows = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def draw(axes: Axes, curve: dict[str, Any]) -> None:
    """Draw accuracy, reward and difficulty of one run by step."""
    steps = [each["step"] for each in curve["steps"]]
    for name, color in (("reward", "tab:blue"), ("accuracy", "tab:green")):
        values = [each[name] for each in curve["steps"]]
        axes.plot(steps, values, color=color, alpha=0.25)
        axes.plot(steps, smoothed(values), color=color, label=f"{name} (mean of {WINDOW} steps)")
    for what, step in curve["killed_at_step"].items():
        axes.axvline(step, color="tab:red", linestyle=":")
        axes.text(step, -0.18, f" {what} killed", color="tab:red", fontsize=8)
    axes.set(xlabel="step", title=f"seed {curve['seed']}", ylim=(-0.2, 1.05))
    right = axes.twinx()
    difficulty = [each["difficulty"] for each in curve["steps"]]
    right.step(steps, difficulty, color="tab:gray", where="post")
    axes.plot([], [], color="tab:gray", label="highest difficulty (right)")
    right.set(ylabel="highest difficulty", ylim=(-0.8, 4.2), yticks=range(5))


def plot(curves: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw all runs, each in a panel of its own."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend was selected

    figure, panels = plt.subplots(1, len(curves), figsize=(11, 4), sharey=True, squeeze=False)
    for axes, curve in zip(panels[0], curves, strict=True):
        draw(axes, curve)
    panels[0][0].set(ylabel="mean of the step")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 0.94))
    figure.suptitle(f"RLVE on the server: {ENVIRONMENT}, a model of 0.9 million parameters, CPU")
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(file, dpi=110)


def main() -> None:
    """Train with each seed, and write the curves."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(SEEDS)) as pool:
        model = Path(folder)
        parameters = save_small_model(RlveConfig(**CONFIG), model)
        data = answers(model)
        curves = list(pool.map(lambda seed: train(model, data, seed), SEEDS))
    result = {
        "model": {"family": "llama", "parameters": parameters},
        "environment": ENVIRONMENT,
        "config": CONFIG,
        "warm_up": {
            "steps": WARM_UP_STEPS,
            "difficulties": WARM_UP_DIFFICULTIES,
            "answers_per_step": WARM_UP_BATCH,
            "share_of_right_answers": WARM_UP_RIGHT,
            "learning_rate": WARM_UP_LEARNING_RATE,
        },
        "runs": curves,
    }
    results = ROOT / "benchmarks" / "results" / "rlve.json"
    results.write_text(json.dumps(result, indent=1) + "\n")
    plot(curves, ROOT / "docs" / "images" / "rlve.png")
    for curve in curves:
        for name, part in (("first", curve["steps"][:10]), ("last", curve["steps"][-10:])):
            means = {key: round(fmean(each[key] for each in part), 3) for key in part[0]}
            print(f"seed {curve['seed']}: means of the {name} ten steps: {means}")


if __name__ == "__main__":
    main()
