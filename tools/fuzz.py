"""Runs the fuzz tests many times with other random cases, several at once, within a time.

    python tools/fuzz.py --cases 100000 --minutes 60

Each piece is a run of pytest with a server of its own. The command prints each piece when it ends,
and the totals. It fails if a piece fails or hangs, or if it had no time for all cases.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import psutil

_TESTS = Path(__file__).parents[1] / "tests" / "fuzz"


@dataclass(frozen=True)
class Piece:
    """What one run of the tests has done."""

    seed: int
    cases: int
    growth: int
    """The most bytes by which a process grew in one test."""
    seconds: float
    failure: str
    """The output of a run that failed; empty for others."""


def run_piece(seed: int, size: int, timeout: float) -> Piece:
    """Run the tests once.

    Args:
        seed: chooses the random cases.
        size: cases of each test.
        timeout: seconds after which the run counts as hanging, and is killed.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        variables = {"FUZZ_CASES": str(size), "FUZZ_REPORT": str(report)}
        options = ["-q", "-p", "no:cacheprovider", f"--timeout={timeout:.0f}"]
        command = [
            sys.executable,
            "-m",
            "pytest",
            *options,
            "--hypothesis-profile=search",
            f"--hypothesis-seed={seed}",
            str(_TESTS),
        ]
        process = subprocess.Popen(  # noqa: S603 - the tests of this repository
            command,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout + 60)
        except subprocess.TimeoutExpired:
            # Servers and heads are processes of their own.
            _kill_all(process)
            output = f"{process.communicate()[0]}\nit was killed after {timeout + 60:.0f} seconds"
        found = json.loads(report.read_text()) if report.exists() else {"cases": 0, "growth": 0}
    failure = output if process.returncode else ""
    seconds = time.monotonic() - started
    return Piece(seed, int(found["cases"]), int(found["growth"]), seconds, failure)


def _kill_all(process: subprocess.Popen[str]) -> None:
    """Kill a process and those that it has started; any of them may have ended."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def run(cases: int, minutes: float, workers: int, size: int, seed: int) -> list[Piece]:
    """Run pieces until enough cases were sent, a piece has failed or the time is over.

    Args:
        cases: cases of all pieces together.
        minutes: after these no other piece starts; those that run get as long again to end.
        workers: pieces that run at once.
        size: cases of each test of a piece.
        seed: of the first piece; each other piece has the next number.
    """
    end = time.monotonic() + 60 * minutes
    done: list[Piece] = []
    running: set[Future[Piece]] = set()
    with ThreadPoolExecutor(workers) as pool:
        while True:
            sent = sum(piece.cases for piece in done)
            over = sent >= cases or time.monotonic() > end or any(p.failure for p in done)
            while not over and len(running) < workers:
                number = seed + len(done) + len(running)
                running.add(pool.submit(run_piece, number, size, 60 * minutes))
            if not running:
                return done
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for piece in (future.result() for future in finished):
                done.append(piece)
                print(
                    f"seed {piece.seed}: {piece.cases} cases in {piece.seconds:.0f} s, memory grew"
                    f" by at most {piece.growth >> 20} MiB; {sent + piece.cases} of {cases} cases",
                    flush=True,
                )
                sent += piece.cases


def main() -> int:
    """Run the tests as the arguments say, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--size", type=int, default=600, help="cases of each test of a piece")
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 31))
    given = parser.parse_args()
    started = time.monotonic()

    pieces = run(given.cases, given.minutes, given.workers, given.size, given.seed)

    failed = [piece for piece in pieces if piece.failure]
    sent = sum(piece.cases for piece in pieces)
    for piece in failed:
        print(f"seed {piece.seed} failed:\n{piece.failure[-20_000:]}", file=sys.stderr)
    print(
        f"{sent} cases in {len(pieces)} pieces and {time.monotonic() - started:.0f} seconds,"
        f" {len(failed)} failed; memory grew by at most"
        f" {max(piece.growth for piece in pieces) >> 20} MiB in a test"
    )
    return 1 if failed or sent < given.cases else 0


if __name__ == "__main__":
    sys.exit(main())
