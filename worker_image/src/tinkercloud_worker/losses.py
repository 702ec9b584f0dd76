"""The losses of the Tinker API as pure functions of logprobs, shared by all trainers.

A loss maps target logprobs to a loss per target; the sum over all targets, never a mean, is
differentiated and reported. The derivative with respect to the logprobs is all a trainer needs
(`derivative`): it multiplies it into its own backward pass.

Notation and formulas (sources: the SDK's docstrings, its cookbook and the published loss pages):
lp target logprob, q the `logprobs` input, A `advantages`, w `weights`, r = exp(lp - q).

    cross_entropy         -w * lp
    importance_sampling   -r * A
    ppo                   -min(r * A, clip(r, low, high) * A)
    cispo                 -stopgrad(clip(r, low, high)) * lp * A
    dro                   -(lp * A - beta / 2 * (lp - q)^2)
    gspo                  as ppo, with r = stopgrad(exp(mean of lp - q over the tokens whose
                          mask is not 0)) times exp(lp - stopgrad(lp))

`low` and `high` bound the ratio itself. They come from `loss_fn_config`, or per token from the
inputs of the same names.

A ratio above exp(80), which float32 could not represent, is clamped to exp(80) in the loss and in
its derivative. With an advantage of zero, or a bound, the result is therefore a number, not NaN;
otherwise the gradient is effectively infinite, and optim_step rejects it.

Shapes: R rows (positions of all data of a request, one after another), K targets per row.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

from tinkercloud_protocol.requests.tensors import FloatArray
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.custom_losses.inputs import DatumInputs
from tinkercloud_worker.custom_losses.uploaded import UploadedLoss

REQUIRED = None
"""The default of an input or setting that is required."""

_LARGEST_LOG_RATIO = 80.0
"""float32 can represent exp(88); the margin is for multiplying by an advantage."""

PUBLISHED_BUT_UNDEFINED = {
    "stable_reinforce": "it has no public definition (in the cookbook, select another with the"
    " option loss_fn)",
}


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """The loss inputs of a request, with the rows of all data concatenated.

    `values` holds float32 [R, K] tensors by input name; `datum_of_row` is int64 [R].
    """

    values: Mapping[str, Tensor]
    datum_of_row: Tensor
    num_data: int
    data: Sequence[DatumInputs] = ()
    """The inputs of a custom loss, for each datum."""

    def rows(self, rows: slice) -> "LossInputs":
        """Return the inputs of some of the rows."""
        values = {name: value[rows] for name, value in self.values.items()}
        return LossInputs(values, self.datum_of_row[rows], self.num_data, self.data)


LossFunction = Callable[[Tensor, LossInputs], Tensor]


@dataclass(frozen=True, slots=True)
class Loss:
    """One entry of the registry.

    `inputs` and `config` map accepted names to defaults. A name in both may be set in either place,
    but not in both.
    """

    function: LossFunction
    inputs: Mapping[str, float | None]
    config: Mapping[str, float | None]
    accepts_many_targets: bool = False
    ignored: Set[str] = frozenset()
    """Inputs that are accepted but have no effect."""
    is_token_local: bool = True
    """Whether a target's loss depends only on that target's logprob."""


def _ratio(log_ratio: Tensor) -> Tensor:
    """Return the clamped exponential, which is its own derivative beyond the bound too."""
    value = log_ratio.detach()
    return torch.exp(value.clamp(max=_LARGEST_LOG_RATIO) + (log_ratio - value))


def _token_ratio(lp: Tensor, x: LossInputs) -> Tensor:
    return _ratio(lp - x.values["logprobs"])


def _clip(ratio: Tensor, x: LossInputs) -> Tensor:
    return torch.clamp(ratio, x.values["clip_low_threshold"], x.values["clip_high_threshold"])


def _pessimistic(ratio: Tensor, x: LossInputs) -> Tensor:
    advantages = x.values["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, x) * advantages)


def cross_entropy(lp: Tensor, x: LossInputs) -> Tensor:
    """Weighted negative log-likelihood; weights may be any float, as custom losses need."""
    return -lp * x.values["weights"]


def importance_sampling(lp: Tensor, x: LossInputs) -> Tensor:
    """Policy gradient with importance weights for samples from another policy."""
    return -_token_ratio(lp, x) * x.values["advantages"]


def ppo(lp: Tensor, x: LossInputs) -> Tensor:
    """Proximal policy optimisation's clipped surrogate."""
    return _pessimistic(_token_ratio(lp, x), x)


def cispo(lp: Tensor, x: LossInputs) -> Tensor:
    """Clipped importance sampling: the ratio is a constant weight, so all tokens keep gradients."""
    return -_clip(_token_ratio(lp, x), x).detach() * lp * x.values["advantages"]


def dro(lp: Tensor, x: LossInputs) -> Tensor:
    """Direct reward optimisation: a quadratic penalty keeps the policy near the sampler."""
    penalty = 0.5 * x.values["beta"] * (lp - x.values["logprobs"]) ** 2
    return -(lp * x.values["advantages"] - penalty)


def gspo(lp: Tensor, x: LossInputs) -> Tensor:
    """PPO with one ratio per sequence: the geometric mean over the tokens selected by the mask.

    A sequence without such tokens has the ratio 1.
    """
    is_marked = x.values["sequence_ratio_mask"] != 0
    log_ratio = (lp.detach() - x.values["logprobs"]) * is_marked
    # In float64: the sum over a sequence of float32 values can't overflow it.
    sums = _by_datum(log_ratio, x)
    counts = _by_datum(is_marked, x)
    mean = torch.where(counts > 0, sums / counts, 0.0).float()[x.datum_of_row].unsqueeze(1)
    return _pessimistic(_ratio(mean + (lp - lp.detach())), x)


def _by_datum(values: Tensor, x: LossInputs) -> Tensor:
    """Return the float64 sums [N] of values [R, K] over each of N data."""
    total = values.new_zeros(x.num_data, dtype=torch.float64)
    return total.index_add_(0, x.datum_of_row, values.sum(1, dtype=torch.float64))


_POLICY = {"logprobs": REQUIRED, "advantages": REQUIRED}
_UNUSED = frozenset({"weights", "mask"})
"""Inputs that scripts for similar services send with policy losses, which do not use them."""
_PPO_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(
        cross_entropy, inputs={"weights": 1.0}, config={}, accepts_many_targets=True
    ),
    "importance_sampling": Loss(importance_sampling, inputs=_POLICY, config={}, ignored=_UNUSED),
    "ppo": Loss(
        ppo,
        inputs={**_POLICY, **_PPO_CLIP},
        config=_PPO_CLIP,
        ignored=_UNUSED,
    ),
    "cispo": Loss(
        cispo,
        inputs={**_POLICY, "clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        ignored=_UNUSED,
    ),
    # No default of beta is published.
    "dro": Loss(dro, inputs=_POLICY, config={"beta": REQUIRED}, ignored=_UNUSED),
    "gspo": Loss(
        gspo,
        # Clients send no thresholds, so the hosted service must have defaults, but none are
        # published. The defaults here are PPO's; the paper's values, 1 - 3e-4 and 1 + 4e-4, must be
        # set explicitly.
        inputs={**_POLICY, "sequence_ratio_mask": REQUIRED, **_PPO_CLIP},
        config=_PPO_CLIP,
        ignored=_UNUSED,
        is_token_local=False,
    ),
}


class _Computed(torch.autograd.Function):
    """Losses that another process has computed, with their derivatives."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        _lp_RK: Tensor,
        losses_D: Tensor,
        gradient_RK: Tensor,
        datum_of_row: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(gradient_RK, datum_of_row)
        return losses_D.clone()

    @staticmethod
    def backward(ctx: BackwardCFunction, of_losses_D: Tensor) -> tuple[Tensor, None, None, None]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        gradient_RK, datum_of_row = saved
        factors_R = of_losses_D.to(gradient_RK.dtype)[datum_of_row]
        return gradient_RK * factors_R.unsqueeze(1), None, None, None


def custom(uploaded: UploadedLoss) -> Loss:
    """Return an uploaded loss, which is computed on the CPU for each datum, in another process.

    Its function raises LossIsComputing if that takes long.
    """

    def run(lp_RK: Tensor, inputs: LossInputs) -> Tensor:
        lengths = torch.bincount(inputs.datum_of_row, minlength=inputs.num_data).tolist()
        rows = torch.split(lp_RK.detach().cpu(), lengths)
        parts = [
            rows_NK[:, : (datum.logprobs_shape[1:] or (1,))[0]].reshape(datum.logprobs_shape)
            for rows_NK, datum in zip(rows, inputs.data, strict=True)
        ]
        values = uploaded.values([part.numpy() for part in parts], inputs.data)
        gradient_RK = torch.zeros(lp_RK.shape)
        for rows_NK, each in zip(torch.split(gradient_RK, lengths), values.gradients, strict=True):
            gradient = torch.from_numpy(each).reshape(len(rows_NK), -1)
            rows_NK[:, : gradient.shape[1]] = gradient
        device = lp_RK.device
        result: Tensor = _Computed.apply(  # type: ignore[no-untyped-call]
            lp_RK,
            torch.from_numpy(values.losses).to(device),
            gradient_RK.to(device),
            inputs.datum_of_row,
        )
        return result

    return Loss(run, inputs={}, config={}, accepts_many_targets=True, is_token_local=False)


def find(name: str) -> Loss:
    """Return the loss of that name.

    Raises:
        InvalidRequest: the name is unknown; the message lists the valid names.
    """
    loss = LOSSES.get(name)
    if loss is not None:
        return loss
    reason = PUBLISHED_BUT_UNDEFINED.get(name, "it is unknown")
    raise InvalidRequest(
        f"loss_fn {name!r} is not available: {reason}; use one of {_listed(LOSSES)}"
    )


def check_config(name: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """Validate the settings of a request and return them without defaults (see `defaults`).

    Raises:
        InvalidRequest: a setting is unknown to the loss or not a finite number.
    """
    accepted = find(name).config
    for key, value in config.items():
        if key not in accepted:
            raise InvalidRequest(
                f"loss_fn_config[{key!r}]: not a setting of loss_fn {name!r}, which accepts"
                f" {_listed(accepted) or 'none'}; remove it"
            )
        if isinstance(value, str) or not -float("inf") < value < float("inf"):
            raise InvalidRequest(f"loss_fn_config[{key!r}]: must be a finite number, got {value!r}")
    return {key: float(value) for key, value in config.items()}


def check_inputs(name: str, given: Sequence[str], config: Mapping[str, float], where: str) -> None:
    """Check that the names of a datum's inputs are valid for the loss.

    Args:
        name: the loss.
        given: names of the datum's loss_fn_inputs, without `target_tokens` and ignored ones.
        config: the request's own settings.
        where: the datum, for messages.

    Raises:
        InvalidRequest: an input is missing, not used by this loss, or set in both places.
    """
    loss = find(name)
    for key in given:
        if key not in loss.inputs:
            raise InvalidRequest(
                f"{where}.loss_fn_inputs[{key!r}]: not an input of loss_fn {name!r}, which"
                f" accepts {_listed(['target_tokens', *loss.inputs])}; remove it"
            )
        if key in config:
            raise InvalidRequest(
                f"{where}.loss_fn_inputs[{key!r}]: also set in loss_fn_config; set it in one"
                " of them only"
            )
    for key, default in {**loss.inputs, **loss.config}.items():
        if default is REQUIRED and key not in given and key not in config:
            place = "loss_fn_config" if key in loss.config else f"{where}.loss_fn_inputs"
            raise InvalidRequest(f"{place}[{key!r}]: required by loss_fn {name!r}")


def check_bounds(inputs: Mapping[str, FloatArray], given: Sequence[str], where: str) -> None:
    """Check that no lower bound of a ratio exceeds its upper bound.

    Args:
        inputs: the inputs of a datum, including settings and defaults.
        given: names of the inputs that the datum itself provides.
        where: the datum, for messages.

    Raises:
        InvalidRequest: a lower bound is above the upper one.
    """
    names = ("clip_low_threshold", "clip_high_threshold")
    if not inputs.keys() >= set(names):
        return
    low, high = (inputs[name] for name in names)
    if (is_above := low > high).any():
        place = f"{where}.loss_fn_inputs" if set(names) & set(given) else "loss_fn_config"
        raise InvalidRequest(
            f"{place}: clip_low_threshold {low[is_above][0]:g} is above clip_high_threshold"
            f" {high[is_above][0]:g}"
        )


def defaults(name: str, config: Mapping[str, float]) -> dict[str, float]:
    """Return the values used where a datum has none: settings first, then defaults."""
    loss = find(name)
    known = {**loss.inputs, **loss.config}
    values = {key: config.get(key, default) for key, default in known.items()}
    return {key: value for key, value in values.items() if value is not REQUIRED}


def derivative(loss: Loss, lp: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return the summed loss (a scalar, float64) and its derivative with respect to `lp`.

    Args:
        loss: the loss.
        lp: float32 [R, K] logprobs; of the full request if the loss is not token-local.
        inputs: the inputs of the same rows.
    """
    leaf = lp.detach().requires_grad_()
    with torch.enable_grad():
        per_target = loss.function(leaf, inputs)
        (gradient,) = torch.autograd.grad(per_target.sum(), leaf)
    return per_target.detach().sum(dtype=torch.float64), gradient


def per_target(
    name: str, logprobs: Sequence[FloatArray], inputs: Sequence[Mapping[str, FloatArray]]
) -> list[FloatArray]:
    """Return the loss of every target: every loss is defined as the sum of these.

    Args:
        name: the loss.
        logprobs: per datum, float32 [N] or [N, K].
        inputs: per datum, float32 [N, K] by name, including settings and defaults.

    Returns:
        Per datum, float32 of the shape of its logprobs.
    """
    sizes = np.array([array.size for array in logprobs])
    flat = {
        key: torch.from_numpy(np.concatenate([datum[key].ravel() for datum in inputs])[:, None])
        for key in inputs[0]
    }
    # Only token-local losses accept K > 1, and for those every target may be a row of its own.
    datum_of_row = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
    lp = torch.from_numpy(np.concatenate([array.ravel() for array in logprobs])[:, None])
    losses = find(name).function(lp, LossInputs(flat, datum_of_row, len(sizes))).numpy().ravel()
    parts = np.split(losses, np.cumsum(sizes)[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, logprobs, strict=True)]


def compares_policies(name: str) -> bool:
    """Return whether the inputs of a loss include the logprobs of the policy that sampled."""
    return {"logprobs", "advantages"} <= LOSSES[name].inputs.keys()


def ppo_kl(logprobs: Sequence[FloatArray], inputs: Sequence[Mapping[str, FloatArray]]) -> float:
    """Return the estimated KL divergence of the sampling policy from the trained one.

    It is k1 of http://joschu.net/blog/kl-approx.html, q - lp: its mean over the sampled tokens of a
    datum, averaged over all data, as RL trainers report it (`ppo_kl` in verl and slime). The SDK
    averages means over chunks by their numbers of data, so this mean is exact, and one over tokens
    would not be.

    Clients send no mask. They send prompts with a logprob and an advantage of 0, so a token with
    either was sampled. A datum without such tokens counts as 0.

    Args:
        logprobs: per datum, float32 [N] or [N, 1].
        inputs: per datum, float32 [N, 1] by name, with `logprobs` and `advantages`.
    """
    starts = np.cumsum([0, *(array.size for array in logprobs[:-1])])
    lp = np.concatenate([array.ravel() for array in logprobs]).astype(np.float64)
    q = np.concatenate([datum["logprobs"].ravel() for datum in inputs])
    advantages = np.concatenate([datum["advantages"].ravel() for datum in inputs])
    is_sampled = (q != 0) | (advantages != 0)
    sums = np.add.reduceat(np.where(is_sampled, q - lp, 0.0), starts)
    counts = np.add.reduceat(is_sampled.astype(np.int64), starts)
    return float(np.mean(sums / np.maximum(counts, 1)))


def _listed(names: Mapping[str, object] | Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
