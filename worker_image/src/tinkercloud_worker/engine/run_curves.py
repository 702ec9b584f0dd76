"""The curves of a head's models: what each optimizer step reports."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial

from pydantic import BaseModel, ConfigDict

from tinkercloud_protocol.heads.reports.thinned_curves import Curve, CurvePoint
from tinkercloud_protocol.requests.hyperparameters import AdamParams
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.metrics import MAX_RUNS, RUN_LOSS

_DEPARTED = 32
"""Models that have left the head whose last steps can still be reported."""
_POLICY_KL = "ppo_kl:mean"


@dataclass(slots=True)
class PassSums:
    """Sums over the passes whose gradient the next step applies."""

    loss: float = 0.0
    weight: float = 0.0
    tokens: int = 0
    kl: float = 0.0
    """KL estimate times the number of examples, of losses that compare policies."""
    examples: int = 0
    """Number of these examples."""


class StoredCurve(BaseModel):
    """A curve in the stored state of a run."""

    # A loss may be NaN.
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")

    stride: int
    points: list[CurvePoint]
    passes: PassSums


class RunCurve:
    """The curve of one model. Belongs to one event loop."""

    def __init__(self, on_step: Callable[[Mapping[str, float]], None]) -> None:
        """Create an empty curve.

        Args:
            on_step: called after each step, and after one that was refused because of its loss,
                with what it reports.
        """
        self.curve = Curve()
        self._on_step = on_step
        self._passes = PassSums()

    def count_pass(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """Count a pass that added to the gradient.

        Args:
            batch: what it computed.
            metrics: the metrics of its response.
        """
        passes = self._passes
        passes.loss += metrics["loss:sum"]
        passes.weight += batch.loss_weight
        passes.tokens += batch.num_tokens
        if _POLICY_KL in metrics:
            passes.kl += metrics[_POLICY_KL] * len(batch.examples)
            passes.examples += len(batch.examples)

    def count_step(self, step: int, params: AdamParams, grad_norm: float) -> None:
        """Count an optimizer step: it applied the gradient of the passes before.

        Args:
            step: its number.
            params: the request's.
            grad_norm: norm of the gradient before clipping.
        """
        passes, self._passes = self._passes, PassSums()
        values = {
            "grad_norm": grad_norm,
            "learning_rate": params.learning_rate,
            "tokens": float(passes.tokens),
        }
        if passes.weight:
            values["loss"] = passes.loss / passes.weight
        if passes.examples:
            values["kl"] = passes.kl / passes.examples
        self.curve.add(step, datetime.now(UTC), values)
        self._on_step(values)

    def drop_passes(self) -> None:
        """Forget the passes since the last step, whose gradient was dropped."""
        self._passes = PassSums()

    def refuse_step(self) -> None:
        """Drop the passes before a refused step, and report their loss if it is not finite.

        It is no point of the curve: there was no step.
        """
        passes = self._passes
        self.drop_passes()
        if passes.weight and not math.isfinite(loss := passes.loss / passes.weight):
            self._on_step({"loss": loss})

    def stored(self, *, has_gradient: bool) -> bytes:
        """Return the curve for the stored state of the run, as JSON.

        Args:
            has_gradient: whether the state has the gradient of the passes since the last step.
        """
        stored = StoredCurve.model_construct(
            stride=self.curve.stride,
            points=self.curve.points,
            passes=PassSums(**asdict(self._passes)) if has_gradient else PassSums(),
        )
        return stored.model_dump_json().encode()

    def restore(self, content: bytes) -> None:
        """Continue a stored curve.

        Raises:
            ValidationError: it is damaged, or of a release that stores curves in another way.
        """
        stored = StoredCurve.model_validate_json(content)
        self.curve = Curve(stored.stride, list(stored.points))
        self._passes = stored.passes


class Curves:
    """The curves of live models and of recently removed ones. Belongs to one event loop."""

    def __init__(self) -> None:
        self._here: dict[str, RunCurve] = {}
        self._departed: OrderedDict[str, RunCurve] = OrderedDict()
        self._exported: dict[str, str] = {}
        """Owners of the models whose losses are among the metrics, by model."""
        self._listeners: list[Callable[[], None]] = []

    def begin(self, name: str, owner: str) -> RunCurve:
        """Return the new curve of a model that the head creates or restores."""
        self._departed.pop(name, None)
        self._here[name] = curve = RunCurve(partial(self._stepped, name, owner))
        return curve

    def depart(self, name: str, curve: RunCurve) -> None:
        """Keep the curve of a model that leaves the head, for the next reports."""
        if self._here.get(name) is not curve:
            return
        del self._here[name]
        if (owner := self._exported.pop(name, None)) is not None:
            RUN_LOSS.remove(owner, name)
        self._departed[name] = curve
        if len(self._departed) > _DEPARTED:
            self._departed.popitem(last=False)

    def all(self) -> Iterator[tuple[str, Curve]]:
        """Yield all curves, with the names of their models."""
        for name, each in (*self._here.items(), *self._departed.items()):
            yield name, each.curve

    def _stepped(self, name: str, owner: str, values: Mapping[str, float]) -> None:
        if "loss" in values and (name in self._exported or len(self._exported) < MAX_RUNS):
            self._exported[name] = owner
            RUN_LOSS.labels(owner, name).set(values["loss"])
        for notify in self._listeners:
            notify()

    @contextmanager
    def notifying(self, notify: Callable[[], None]) -> Iterator[None]:
        """Call a function after every step of any model, until the context ends."""
        self._listeners.append(notify)
        try:
            yield
        finally:
            self._listeners.remove(notify)
