"""An agent that only knows OpenAI's API becomes a reinforcement learning environment.

`agent` is ordinary code on the `openai` package. `train` gives it the URL of a recorded session,
fetches the exact tokens and logprobs of its turns, and trains the model with their reward.

    pip install openai tinker
    python examples/openai_agent.py
"""

import json
import os
import re
import sys
import urllib.request

from common import BASE_URL, MODEL, ensure_key, wait_until_healthy

import openai  # isort: skip
import tinker  # isort: skip
from tinker import types  # isort: skip

EPISODES = 4


def agent(base_url: str, model: str) -> float:
    """Ask for a number, then for a larger one; return the share of answers that name one."""
    client = openai.OpenAI(base_url=base_url, api_key=os.environ["TINKER_API_KEY"])
    messages = [{"role": "user", "content": "Name a number. Answer with digits only."}]
    found = []
    for _ in range(2):
        completion = client.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=8
        )
        text = completion.choices[0].message.content or ""
        found.append(bool(re.search(r"\d", text)))
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Name a larger one."},
        ]
    return sum(found) / len(found)


def call(method: str, path: str, content: dict | None = None) -> dict:
    """Call the recorded sessions of the server."""
    request = urllib.request.Request(  # noqa: S310 - the server's own URL
        f"{BASE_URL}/oai/sessions{path}",
        method=method,
        data=None if content is None else json.dumps(content).encode(),
        headers={"Authorization": f"Bearer {os.environ['TINKER_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as response:  # noqa: S310 - as above
        return json.load(response)


def as_datum(recorded: dict, advantage: float) -> types.Datum:
    """Return a recorded datum with an advantage for each sampled token."""
    inputs = {name: types.TensorData(**each) for name, each in recorded["loss_fn_inputs"].items()}
    mask = inputs.pop("mask")
    inputs["advantages"] = types.TensorData(
        data=[advantage * sampled for sampled in mask.data], dtype="float32", shape=mask.shape
    )
    [chunk] = recorded["model_input"]["chunks"]
    return types.Datum(
        model_input=types.ModelInput.from_ints(chunk["tokens"]), loss_fn_inputs=inputs
    )


def train(client: tinker.ServiceClient, steps: int) -> None:
    """Train a LoRA adapter on episodes of the agent, and print the rewards of each step."""
    print(f"Creating a run of {MODEL} ...", flush=True)
    training = client.create_lora_training_client(base_model=MODEL, rank=16).result()
    for step in range(steps):
        path = training.save_weights_for_sampler(f"step-{step}").result().path
        episodes = []
        for _ in range(EPISODES):
            session = call("POST", "", {"model": path})["id"]
            reward = agent(f"{BASE_URL}/oai/sessions/{session}/v1", path)
            episodes.append((reward, call("GET", f"/{session}/datums")["data"]))
            print(f"episode {len(episodes)} of step {step}: reward {reward:.2f}", flush=True)
            call("DELETE", f"/{session}")
        mean = sum(reward for reward, _ in episodes) / len(episodes)
        data = [as_datum(each, reward - mean) for reward, turns in episodes for each in turns]
        training.forward_backward(data, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        print(f"step {step}: mean reward {mean:.2f} from {len(data)} datums", flush=True)


if __name__ == "__main__":
    wait_until_healthy()
    ensure_key()
    with tinker.ServiceClient(base_url=BASE_URL) as service:
        train(service, steps=int(sys.argv[1]) if len(sys.argv) > 1 else 5)
