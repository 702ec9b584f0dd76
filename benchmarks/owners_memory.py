"""What a head keeps in memory of owners who have finished.

    PYTHONPATH=tests/support python -m benchmarks.owners_memory [--owners 6] [--minutes 22] [--tiny]

Owners create runs of different ranks one after the other, train them with texts of different
lengths, save and sample, and finish their session, as the SDK does. The memory of the idle head is read before the first
run, after three minutes, in which it has loaded everything that it needs, and at the end.
"""

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from tinker import types

from tinkercloud_testing.clients.sdk_steps import a_text
from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.small_models.models import save, smollm2, tiny_llama

MODEL = "benchmark/model"
WARM_MINUTES = 3
IDLE_SECONDS = 180
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--owners", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=22)
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead of SmolLM2")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = save(tiny_llama(), Path(scratch) / "model") if chosen.tiny else smollm2()
        with a_server(Path(scratch) / "state", {MODEL: folder}) as server:
            keys = [server.new_key(f"owner {index}") for index in range(chosen.owners)]
            before = idle_memory(server)
            work_for(server, keys, WARM_MINUTES)
            warm = idle_memory(server)
            count = work_for(server, keys, chosen.minutes)
            after = idle_memory(server)
    result = {"owners": len(keys), "minutes": chosen.minutes, "runs": count, "tiny": chosen.tiny}
    sizes = {"before_mib": before, "warm_mib": warm, "after_mib": after, "kept_mib": after - warm}
    print(json.dumps(result | sizes))


def work_for(server: Server, keys: Sequence[str], minutes: float) -> int:
    """Let all owners run one run after the other at the same time, and return how many."""
    until = time.monotonic() + 60 * minutes
    with ThreadPoolExecutor(len(keys)) as threads:
        numbers = range(len(keys))
        return sum(threads.map(lambda index: work(server, index, keys[index], until), numbers))


def work(server: Server, index: int, key: str, until: float) -> int:
    """Run one run after the other, and return how many."""
    chance = random.Random(index)  # noqa: S311
    for count in itertools.count():
        if time.monotonic() > until:
            return count
        one_run(server, key, chance)
    raise AssertionError


def one_run(server: Server, key: str, chance: random.Random) -> None:
    with server.client(key) as service:
        rank = chance.choice([4, 8, 16])
        training = service.create_lora_training_client(MODEL, rank=rank).result()
        for _ in range(5):
            training.forward_backward(texts(chance), "cross_entropy").result()
            training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        sampler = training.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints(tokens(chance, 64))
        sampler.sample(prompt, 4, types.SamplingParams(max_tokens=32, seed=1)).result()
        training.save_state("last").result()


def texts(chance: random.Random) -> list[types.Datum]:
    lengths = [chance.randint(16, 256) for _ in range(4)]
    return [a_text(tokens(chance, each), weights=[1.0] * (each - 1)) for each in lengths]


def tokens(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(1, 60) for _ in range(length)]


def idle_memory(server: Server) -> int:
    """Return the MiB of physical memory of the head once it has freed its caches."""
    time.sleep(IDLE_SECONDS)
    total: int = sum(psutil.Process(pid).memory_info().rss for pid in server.head_pids())
    return total // MIB


if __name__ == "__main__":
    main()
