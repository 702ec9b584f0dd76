"""The curve of a run survives crashes and suspensions of its heads unchanged."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.reports.thinned_curves import CurveReport
from tinkercloud_protocol.requests.hyperparameters import AdamParams
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.serving.bare_heads import ADAM, MODEL, Head, a_head, train, until
from tinkercloud_worker.engine.batch import Batch, Example
from tinkercloud_worker.engine.run_curves import Curves, RunCurve
from tinkercloud_worker.head.serve.lease_reports import Reported, curve_changes, curve_lines
from tinkercloud_worker.metrics import MAX_RUNS, RUN_LOSS

pytestmark = pytest.mark.timeout(300)

SNAPSHOTS = DurabilityConfig(snapshot_steps=2)
LAST = 10
"""Number of the last request of five steps."""


def points(head: Head) -> list[tuple[int, Any]]:
    """Return the curve of the model, without the times of its steps."""
    ((_, curve),) = head.backend.curves.all()
    return [(point.step, point.metrics) for point in curve.points]


def a_batch() -> Batch:
    """Return a batch whose weights sum up to three."""
    example = Example(
        np.zeros(3, np.int32),
        np.zeros((3, 1), np.int64),
        {"weights": np.ones((3, 1), np.float32)},
        True,
    )
    return Batch([example], "cross_entropy", forward_only=False)


async def undisturbed(folder: Path) -> list[tuple[int, Any]]:
    with a_head(folder.as_uri(), folder, "g") as head:
        await head.begin()
        await train(head, 1, LAST)
        return points(head)


async def test_a_step_reports_its_loss_gradient_norm_learning_rate_and_tokens(
    tmp_path: Path,
) -> None:
    with a_head(tmp_path.as_uri(), tmp_path, "g") as head:
        await head.begin()
        head.add(1)
        head.add(2, first=9)
        head.apply(3)
        loss = await head.loss(1) + await head.loss(2)
        await head.answer(3)

        ((step, metrics),) = points(head)

    means = {name: values.mean for name, values in metrics.items()}
    assert step == 1
    assert means.pop("grad_norm") > 0
    assert means == {
        "loss": pytest.approx(loss / 6),
        "learning_rate": ADAM["learning_rate"],
        "tokens": 6.0,
    }


@pytest.mark.parametrize("durability", [SNAPSHOTS, DurabilityConfig()], ids=["snapshot", "journal"])
async def test_a_killed_head_is_followed_by_one_with_the_same_curve(
    tmp_path: Path, durability: DurabilityConfig
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals, durability=durability) as head:
        await head.begin()
        await train(head, 1, 6)
        if durability is SNAPSHOTS:
            await until((journals / f"runs/{MODEL}/suspended/manifest.json").exists)
        # A pass whose step follows in the next head.
        head.add(7, first=12)
        await head.confirmed()
        await head.answer(7)

    with a_head(root, tmp_path, "g2", journals=journals, durability=durability) as head:
        await head.resume("g1")
        head.apply(8)
        await head.answer(8)
        await train(head, 9, LAST)
        assert points(head) == await undisturbed(tmp_path / "undisturbed")


async def test_a_suspended_run_continues_its_curve_in_another_head(tmp_path: Path) -> None:
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        await train(head, 1, 6)
        head.add(7, first=12)
        await head.answer(7)
        await head.service.suspend()

    with a_head(root, tmp_path, "g2") as head:
        await head.resume("g1")
        head.apply(8)
        await head.answer(8)
        await train(head, 9, LAST)
        assert points(head) == await undisturbed(tmp_path / "undisturbed")


async def test_passes_whose_gradient_is_lost_to_a_checkpoint_are_in_no_step(tmp_path: Path) -> None:
    with a_head(tmp_path.as_uri(), tmp_path, "g") as head:
        await head.begin()
        await train(head, 1, 2)
        head.send(routes.SAVE_WEIGHTS, 3, path="first")
        head.add(4)
        head.send(routes.LOAD_WEIGHTS, 5, path=f"tinker://{MODEL}/weights/first", optimizer=True)
        head.add(6)
        head.apply(7)
        await head.answer(7)

        (_, (_, metrics)) = points(head)

    assert metrics["tokens"].mean == 3.0


async def test_a_head_reports_the_loss_for_which_it_refuses_a_step(tmp_path: Path) -> None:
    with a_head(tmp_path.as_uri(), tmp_path, "g") as head:
        await head.begin()
        head.add(1)
        head.send(routes.OPTIM_STEP, 2, adam_params={"learning_rate": 1e38})
        head.add(3)
        head.apply(4)

        assert b"gradient contains NaN" in await head.answer(4)
        assert math.isnan(losses_of("me")[str(MODEL)])
        assert len(points(head)) == 1


async def test_a_lease_says_only_what_has_changed_in_a_curve(tmp_path: Path) -> None:
    with a_head(tmp_path.as_uri(), tmp_path, "g") as head:
        await head.begin()
        reported = Reported()

        def changed() -> list[int]:
            lines = [
                CurveReport.model_validate_json(line)
                for change in curve_changes(head.backend, reported)
                for line in curve_lines(change)
            ]
            return [point.step for line in lines for point in line.points]

        assert changed() == []
        await train(head, 1, 4)
        assert changed() == [1, 2]
        await train(head, 5, 6)
        assert changed() == [3]
        assert changed() == []


async def test_the_passes_of_a_gradient_that_is_not_finite_are_in_no_step(tmp_path: Path) -> None:
    with a_head(tmp_path.as_uri(), tmp_path, "g") as head:
        await head.begin()
        head.add_all(1, [[5, 6, 7, 8]], weight=3e38)
        head.apply(2)
        assert b"NaN or infinity" in await head.answer(2)
        head.add(3)
        head.apply(4)
        await head.answer(4)

        ((_, metrics),) = points(head)

    assert metrics["tokens"].mean == 3.0
    assert metrics["loss"].not_finite == 0


def test_a_curve_with_a_loss_that_is_not_finite_is_stored_and_restored() -> None:
    curve, restored = RunCurve(lambda _: None), RunCurve(lambda _: None)
    batch = a_batch()
    curve.count_pass(batch, {"loss:sum": math.nan})
    curve.count_step(1, AdamParams(), math.inf)
    curve.count_pass(batch, {"loss:sum": math.inf})

    restored.restore(curve.stored(has_gradient=True))

    assert restored.curve == curve.curve
    for each in (curve, restored):
        each.count_step(2, AdamParams(), 1.0)
    assert restored.curve.points[-1].metrics == curve.curve.points[-1].metrics
    assert restored.curve.points[-1].metrics["loss"].not_finite == 1

    restored.restore(curve.stored(has_gradient=False))
    restored.count_step(3, AdamParams(), 1.0)
    assert restored.curve.points[-1].metrics["tokens"].mean == 0.0


def test_a_restored_curve_is_reported_whole_although_it_has_fewer_steps() -> None:
    curves, reported = Curves(), Reported()
    backend = SimpleNamespace(curves=curves)
    run = curves.begin("m", "me")
    for step in range(1, 11):
        run.count_step(step, AdamParams(), 1.0)
    stored = RunCurve(lambda _: None)
    for step in range(1, 6):
        stored.count_step(step, AdamParams(), 1.0)
    curve_changes(backend, reported)  # type: ignore[arg-type]

    run.restore(stored.stored(has_gradient=True))
    for step in range(6, 11):
        run.count_step(step, AdamParams(), 2.0)

    (changed,) = curve_changes(backend, reported)  # type: ignore[arg-type]
    assert [point.step for point in changed.points] == list(range(1, 11))


def losses_of(owner: str) -> dict[str, float]:
    """Return the losses that are among the metrics, by run."""
    samples = [sample for family in RUN_LOSS.collect() for sample in family.samples]
    return {s.labels["run"]: s.value for s in samples if s.labels["owner"] == owner}


def test_the_last_loss_of_each_run_in_the_head_is_among_the_metrics() -> None:
    curves = Curves()
    runs = {name: curves.begin(name, "of-losses") for name in ("a", "b", "without a step")}
    for loss, name in ((6.0, "a"), (9.0, "b"), (1.5, "a")):
        runs[name].count_pass(a_batch(), {"loss:sum": loss})
        runs[name].count_step(1, AdamParams(), 1.0)

    assert losses_of("of-losses") == {"a": 0.5, "b": 3.0}
    for name, run in runs.items():
        curves.depart(name, run)
    assert losses_of("of-losses") == {}


def test_a_step_that_was_refused_for_its_loss_is_among_the_metrics_until_the_next_one() -> None:
    curves = Curves()
    run = curves.begin("a", "of-refused")
    run.count_pass(a_batch(), {"loss:sum": math.nan})

    run.refuse_step()

    assert math.isnan(losses_of("of-refused")["a"])
    assert run.curve.points == []
    run.count_pass(a_batch(), {"loss:sum": 3.0})
    run.refuse_step()
    assert math.isnan(losses_of("of-refused")["a"])
    run.count_pass(a_batch(), {"loss:sum": 3.0})
    run.count_step(1, AdamParams(), 1.0)
    assert losses_of("of-refused") == {"a": 1.0}
    curves.depart("a", run)


def test_only_so_many_runs_of_a_head_have_a_loss_among_the_metrics() -> None:
    curves = Curves()
    runs = {str(number): curves.begin(str(number), "many") for number in range(MAX_RUNS + 2)}
    for run in runs.values():
        run.count_pass(a_batch(), {"loss:sum": 1.0})
        run.count_step(1, AdamParams(), 1.0)

    assert len(losses_of("many")) == MAX_RUNS
    for name, run in runs.items():
        curves.depart(name, run)
