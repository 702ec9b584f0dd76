"""What one poll for all samples of a client changes: `python -m benchmarks futures`.

Two servers, one whose clients poll so (`TINKERCLOUD_BATCH_POLLS`) and one whose clients poll for
each sample, take turns. Clients are the real SDK; the model is tiny, so that its computation hides
little of the server's work. Every ratio is that of batch polls to single ones.
"""

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import tinker
from tinker import types

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from benchmarks.measuring import Measurement
from tinkercloud_testing.models import save, tiny_llama
from tinkercloud_testing.servers import Server, a_server

MODEL = "tiny/llama"
PROMPT = types.ModelInput.from_ints([5, 6, 7])
ROUNDS = 15
LOADS = ((1, 16), (8, 16), (64, 16), (64, 256))
"""How many samples are requested at once, and the tokens of each."""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Side:
    """One of the servers, with what was measured of it in each round."""

    server: Server
    sampler: tinker.SamplingClient
    seconds: list[float] = field(default_factory=list)
    """From the first request to the last result."""
    latencies: list[float] = field(default_factory=list)
    """Median seconds from a request to its result."""
    cpu: list[float] = field(default_factory=list)
    """Seconds of the API server's process."""
    requests: list[float] = field(default_factory=list)
    """HTTP requests that it answered."""

    def round(self, width: int, params: types.SamplingParams) -> None:
        """Request samples at once, wait for all of them, and note what it took."""
        assert self.server.process is not None
        pid = self.server.process.pid
        requests, cpu = self._requests(), _cpu_seconds(pid)
        latencies: list[float] = []
        done = threading.Event()
        start = time.perf_counter()

        def note(_future: object) -> None:
            latencies.append(time.perf_counter() - start)
            if len(latencies) == width:
                done.set()

        futures = [self.sampler.sample(PROMPT, 1, params) for _ in range(width)]
        for future in futures:
            future.future().add_done_callback(note)
        done.wait()
        self.seconds.append(time.perf_counter() - start)
        self.latencies.append(statistics.median(latencies))
        self.cpu.append(_cpu_seconds(pid) - cpu)
        self.requests.append(self._requests() - requests)
        for future in futures:
            future.result()

    def _requests(self) -> float:
        return self.server.metric("tinkercloud_http_requests_total")

    def forget(self) -> None:
        """Forget what was measured."""
        for measured in (self.seconds, self.latencies, self.cpu, self.requests):
            measured.clear()


def measure(_folder: str) -> Iterator[Measurement]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = save(tiny_llama(), Path(folder) / "model")
        sides = []
        for name, switched in (("single", "false"), ("batched", "true")):
            settings = {"TINKERCLOUD_BATCH_POLLS": switched, "TINKERCLOUD_LOG_LEVEL": "info"}
            server = stack.enter_context(a_server(Path(folder) / name, {MODEL: model}, settings))
            sampler = server.client().create_sampling_client(base_model=MODEL).result()
            assert (sampler.holder.get_client_config().sample_use_retrieve_futures) == (
                switched == "true"
            )
            sides.append(Side(server, sampler))
        single, batched = sides
        for width, tokens in LOADS:
            yield from _compared(single, batched, width, tokens)


def _compared(single: Side, batched: Side, width: int, tokens: int) -> Iterator[Measurement]:
    params = types.SamplingParams(max_tokens=tokens, stop=[])
    for number in range(ROUNDS + 1):
        # They change places, so that neither always follows the other.
        for side in (single, batched) if number % 2 else (batched, single):
            side.round(width, params)
        if number == 0:
            single.forget()
            batched.forget()
    load = f"{width} x {tokens} tokens"
    rates = [width / statistics.median(side.seconds) for side in (single, batched)]
    latencies = [1e3 * statistics.median(side.latencies) for side in (single, batched)]
    # Single rounds take less than the resolution of this clock.
    cpus = [1e3 * statistics.fmean(side.cpu) / width for side in (single, batched)]
    requests = [statistics.fmean(side.requests) / width for side in (single, batched)]
    name = f"{width}-{tokens}"
    yield Measurement(
        f"F-rate-{name}",
        f"results/s, {load}",
        rates[1] / rates[0],
        "x",
        ">= 1.0",
        ">= 1.2",
        f"{rates[0]:.1f}/s one by one, {rates[1]:.1f}/s batched",
    )
    yield Measurement(
        f"F-latency-{name}",
        f"median latency of a result, {load}",
        latencies[1] / latencies[0],
        "x",
        "<= 1.0",
        "<= 0.85",
        f"{latencies[0]:.1f} ms one by one, {latencies[1]:.1f} ms batched",
    )
    yield Measurement(
        f"F-cpu-{name}",
        f"CPU of the API server for a result, {load}",
        cpus[1] / cpus[0] if cpus[0] else float("nan"),
        "x",
        "<= 1.0",
        "<= 0.85",
        f"{cpus[0]:.2f} ms and {requests[0]:.2f} requests one by one, {cpus[1]:.2f} ms and"
        f" {requests[1]:.2f} requests batched",
    )
    single.forget()
    batched.forget()


def _cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
