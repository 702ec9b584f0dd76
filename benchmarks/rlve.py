"""Trains SmolLM2 on one RLVE environment, on this machine's CPU: `make rlve`.

1. A server is started, and a model is warmed up: it sees a few solved problems, so that it sometimes
   answers in the form `<answer>12</answer>`, which the original model never does.
2. RLVE trains the model on the server. In the middle, first the program and then the session head
   are killed (SIGKILL); nobody does anything about it.
3. The reward and the difficulty of each step are written to docs/images/rlve.png and
   benchmarks/results/rlve.json.
"""

import json
import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import psutil
import tinker
from tinker import types

from tinkercloud_programs.rlve.problems import Problems
from tinkercloud_programs.rlve.prompts import prompt_tokens
from tinkercloud_protocol.rlve import RlveConfig
from tinkercloud_testing.models import smollm2
from tinkercloud_testing.sdk_steps import a_text
from tinkercloud_testing.servers import Server, a_server

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ENVIRONMENT = "Division"
WARM_UP_STEPS, WARM_UP_BATCH = 3, 8
KILL_PROGRAM_AT, KILL_HEAD_AT = 9, 18
CONFIG: dict[str, Any] = {
    "enabled": True,
    "environment_list": [ENVIRONMENT],
    "custom_prompt_preprocessor": "ChatTemplate_NoSystemPrompt",
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 8,
    "over_sampling_batch_size": 4,
    "rollout_max_response_len": 16,
    "min_prompts_before_difficulty_check": 12,
    "difficulty_sliding_window_size": 2,
    "num_rollout": 32,
    "save_every_steps": 4,
    "learning_rate": 1.5e-4,
}
WINDOW = 6
"""Steps that a point of the smooth curves is the mean of."""
ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^step (\d+): reward (\S+), accuracy (\S+), difficulty \S+ (\d+)$", re.MULTILINE)


def warm_up(training: tinker.TrainingClient) -> None:
    """Teach a model the form of the answers."""
    config, chance = RlveConfig(**CONFIG), random.Random(0)  # noqa: S311 - not for secrets
    problems, tokenizer = Problems(config), training.get_tokenizer()
    for step in range(WARM_UP_STEPS):
        batch = []
        for _ in range(WARM_UP_BATCH):
            problem = problems.generate(ENVIRONMENT, 0, chance)
            prompt = prompt_tokens(tokenizer, problem.text, config)
            number = next(n for n in range(100) if problem.verify(f"<answer>{n}</answer>").accuracy)
            ending = f"<answer>{number}</answer><|im_end|>"
            answer = tokenizer.encode(ending, add_special_tokens=False)
            weights = [0.0] * (len(prompt) - 1) + [1.0 / WARM_UP_BATCH] * len(answer)
            batch.append(a_text([*prompt, *answer], weights=weights))
        gradient = training.forward_backward(batch, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        print(f"warm-up {step + 1}: loss {gradient.result().metrics['loss:sum']:.3f}", flush=True)


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
        time.sleep(1)


def train(server: Server) -> dict[str, Any]:
    """Train a model, and return the curve."""
    client = server.client()
    warm = client.create_lora_training_client(base_model=MODEL, rank=16).result()
    warm_up(warm)
    saved = warm.save_state("warm").result().path
    # Without the optimizer, whose moments are those of much larger gradients.
    training = client.create_training_client_from_state(saved).result()
    body = {"model_id": training.model_id, "rlve_config": CONFIG}
    answer = server.post("programs", body)
    assert answer.status == 200, answer.body
    program_id, started = answer.json()["program_id"], time.monotonic()
    kills = {KILL_PROGRAM_AT: ("program", kill_program), KILL_HEAD_AT: ("head", Server.kill_heads)}
    last = None
    for program in watched(server, program_id):
        step = program["progress"].get("step", 0)
        if step != last:
            print(f"{time.monotonic() - started:.0f} s: step {step}", flush=True)
        last = step
        if step in kills:
            what, kill = kills.pop(step)
            kill(server)
            print(f"killed the {what} at step {step}", flush=True)
    text = str(server.request("GET", f"/api/v1/programs/{program_id}/logs").json()["text"])
    print(text)
    points = {int(step): list(map(float, rest)) for step, *rest in LINE.findall(text)}
    names = ["reward", "accuracy", "difficulty"]
    return {
        "model": MODEL,
        "environment": ENVIRONMENT,
        "config": CONFIG,
        "warm_up": {"steps": WARM_UP_STEPS, "solved_problems_per_step": WARM_UP_BATCH},
        "seconds": round(time.monotonic() - started),
        "phase": program["phase"],
        "restarts": program["restarts"],
        "killed_at_step": {"program": KILL_PROGRAM_AT, "head": KILL_HEAD_AT},
        "steps": [
            {"step": step, **dict(zip(names, values, strict=True))}
            for step, values in sorted(points.items())
        ],
    }


def smoothed(values: list[float]) -> list[float]:
    """Return the mean of each value and those before it, up to `WINDOW` values."""
    windows = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def plot(curve: dict[str, Any], file: Path) -> None:
    """Draw reward and difficulty by step."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend was selected

    steps = [each["step"] for each in curve["steps"]]
    figure, axes = plt.subplots(figsize=(8, 4))
    for name, color in (("reward", "tab:blue"), ("accuracy", "tab:green")):
        values = [each[name] for each in curve["steps"]]
        axes.plot(steps, values, color=color, alpha=0.35)
        axes.plot(steps, smoothed(values), color=color, label=f"{name} (mean of {WINDOW} steps)")
    for what, step in curve["killed_at_step"].items():
        axes.axvline(step, color="tab:red", linestyle=":")
        axes.text(step, -0.98, f" {what} killed", color="tab:red", fontsize=8)
    axes.set(xlabel="step", ylabel="mean of the step", ylim=(-1.05, 1.05))
    axes.set_title(f"RLVE on the server: {curve['environment']}, SmolLM2-135M, two CPU cores")
    right = axes.twinx()
    difficulty = [each["difficulty"] for each in curve["steps"]]
    right.step(steps, difficulty, color="tab:gray", where="post", label="difficulty")
    right.set(ylabel="highest difficulty", ylim=(0, max(difficulty) + 1))
    figure.legend(loc="lower right", bbox_to_anchor=(0.9, 0.15))
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Train, and write the curve."""
    with (
        tempfile.TemporaryDirectory() as folder,
        a_server(Path(folder), {MODEL: smollm2()}) as server,
    ):
        curve = train(server)
    results = ROOT / "benchmarks" / "results" / "rlve.json"
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(curve, indent=1) + "\n")
    plot(curve, ROOT / "docs" / "images" / "rlve.png")
    first, last = curve["steps"][:5], curve["steps"][-5:]
    for name, part in (("first", first), ("last", last)):
        print(f"reward of the {name} five steps: {sum(e['reward'] for e in part) / len(part):.3f}")


if __name__ == "__main__":
    main()
