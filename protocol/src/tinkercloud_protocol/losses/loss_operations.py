"""The operations of custom losses, by the names that torch.fx gives them.

They are deterministic, have no side effects, and their results have shapes that depend on shapes
only, so that the cost of a loss is known before it runs.
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_UNARY = """
abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal
sigmoid tanh sin cos tan asin acos atan sinh cosh asinh acosh atanh erf erfc floor ceil round trunc
frac sign sgn relu logit isnan isinf isfinite nan_to_num clone detach logical_not lgamma digamma
"""
_BINARY = """
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power
maximum minimum fmax fmin atan2 hypot logaddexp logaddexp2 eq ne lt le gt ge not_equal less
less_equal greater greater_equal logical_and logical_or logical_xor clamp clamp_min clamp_max clip
lerp addcmul addcdiv xlogy heaviside masked_fill copysign dot mv mm matmul outer where
"""
_REDUCTIONS = """
sum mean prod max min amax amin var std median norm logsumexp softmax log_softmax cumsum cumprod
logcumsumexp cummax cummin argmax argmin all any count_nonzero nansum nanmean sort argsort topk
"""
_SHAPES = """
reshape squeeze unsqueeze transpose t permute flatten roll flip narrow select gather index_select
take_along_dim chunk split unbind tril triu diagonal tile movedim swapaxes
"""
_COMMON = _names(f"{_UNARY} {_BINARY} {_REDUCTIONS} {_SHAPES}")

TORCH = _COMMON | _names(
    """
    stack cat concat broadcast_to zeros ones full arange linspace zeros_like ones_like full_like
    scalar_tensor meshgrid hstack vstack
    """
)
"""Functions of torch."""
FUNCTIONAL = _names(
    """
    relu relu6 leaky_relu elu selu celu gelu silu softplus softsign logsigmoid hardtanh hardsigmoid
    hardswish mish softmin softmax log_softmax sigmoid tanh pad normalize cosine_similarity mse_loss
    l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits
    _threshold softshrink hardshrink tanhshrink
    """
)
"""Functions of torch.nn.functional."""
SPECIAL = _names("expit logit xlogy xlog1py log_softmax softmax logsumexp entr erf erfc")
"""Functions of torch.special."""
OPERATORS = _names(
    """
    add sub mul truediv floordiv mod pow neg pos abs invert matmul eq ne lt le gt ge and_ or_ xor
    getitem iadd isub imul itruediv
    """
)
"""Functions of the module operator."""
METHODS = _COMMON | _names(
    """
    view view_as reshape_as expand expand_as repeat size dim numel contiguous float double half
    bfloat16 long int bool to type_as new_zeros new_ones new_full
    """
)
"""Methods of torch.Tensor."""
ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "T", "mT", "values", "indices"})
"""Attributes of tensors and of what reductions return."""
DTYPES = _names(
    "float float32 float64 double float16 half bfloat16 int64 long int32 int int16 int8 uint8 bool"
)
TEXTS = _names(
    """
    none mean sum batchmean trunc floor tanh fro constant reflect replicate circular ij xy cpu cuda
    """
)
"""Texts that may be arguments, whose cost is what the shapes show. `nuc` of norms is not."""
_NAMESPACES = {
    "torch.nn.functional.": ("functional", FUNCTIONAL),
    "torch._C._nn.": ("functional", FUNCTIONAL),
    "torch._C._special.special_": ("special", SPECIAL),
    "torch.special.": ("special", SPECIAL),
    "torch.functional.": ("torch", TORCH),
    "torch.": ("torch", TORCH),
    "operator.": ("operator", OPERATORS),
}
"""Prefixes of names that torch.fx records, most specific first."""
_RENAMED = {"torch._C._nn.log_sigmoid": "functional.logsigmoid"}


def canonical(target: str) -> str | None:
    """Return the name of a function without the ways in which torch.fx spells it.

    Returns:
        Such as `functional.softplus`; `getattr` for itself; None if it is not allowed.
    """
    if target == "getattr" or target in _RENAMED:
        return _RENAMED.get(target, target)
    for prefix, (namespace, allowed) in _NAMESPACES.items():
        if target.startswith(prefix):
            name = target.removeprefix(prefix)
            return f"{namespace}.{name}" if name in allowed else None
    return None
