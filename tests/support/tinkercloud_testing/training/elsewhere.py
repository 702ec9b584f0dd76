"""A fake device other than the CPU, for machines without one: `elsewhere`.

Its tensors hold real data and reject the same operations as GPU tensors: those that mix them with
CPU tensors, and conversion to NumPy. Code that ignores the device of its tensors therefore fails
here too. The differences from a GPU are its speed, its kernels and its synchronous execution.

Importing this module makes the device the accelerator of the process, which cannot be undone:
import it in a separate process.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

_NAME = "elsewhere"
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations whose indices may be on the CPU, as with CUDA."""


class _Backend(_DummyBackendModule):
    """The module interface that torch expects of an accelerator."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes of mixed precision, which recomputed layers query."""
        return [torch.float16, torch.bfloat16]


_setup_privateuseone_for_python_backend(_NAME, backend_module=_Backend())
# Converting a module replaces its tensors: the data behind them cannot be swapped.
torch.__future__.set_swap_module_params_on_conversion(True)

DEVICE = torch.device(_NAME, 0)


class _Elsewhere(torch.Tensor):
    """A tensor that reports the fake device and keeps its data in a CPU tensor."""

    here: Tensor

    @staticmethod
    def __new__(cls: "type[_Elsewhere]", here: Tensor) -> "_Elsewhere":
        tensor: _Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
        )
        tensor.here = here
        return tensor

    def tolist(self) -> Any:
        """Return the values, which are copied to the CPU implicitly, as for a GPU tensor."""
        return self.here.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage, which identifies tensors that share memory."""
        return self.here.untyped_storage()

    def data_ptr(self) -> int:
        """Return an address, like that of a GPU tensor."""
        return self.here.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # as torch documents it
        cls, operation: Any, _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _compute(operation, args, kwargs or {})


def _compute(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the CPU, with results that report the expected device."""
    name = operation._schema.name.removeprefix("aten::")
    known: dict[int, _Elsewhere] = {}

    def here(value: Any) -> Any:
        if not isinstance(value, _Elsewhere):
            return value
        known[id(value.here)] = value
        return value.here

    def there(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # An in-place operation returns the same tensor.
        return known[id(value)] if id(value) in known else _Elsewhere(value)

    is_there = _is_there(name, (args[:1], kwargs) if name in _INDEXES else (args, kwargs))
    args, kwargs = tree_map(here, (args, kwargs))
    if kwargs.get("device") is not None:
        is_there = torch.device(kwargs["device"]).type == _NAME
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = operation(*args, **kwargs)
    return tree_map(there, result) if is_there else result


def _is_there(name: str, arguments: Any) -> bool:
    """Return the device of an operation.

    Raises:
        RuntimeError: The tensors are on different devices.
    """
    tensors = [value for value in tree_leaves(arguments) if isinstance(value, Tensor)]
    if name == "copy_":
        return isinstance(tensors[0], _Elsewhere)
    elsewhere = [tensor for tensor in tensors if isinstance(tensor, _Elsewhere)]
    # A GPU accepts scalar tensors on the CPU.
    strangers = [tensor for tensor in tensors if tensor.ndim and not isinstance(tensor, _Elsewhere)]
    if elsewhere and strangers:
        raise RuntimeError(
            f"{name}: expected all tensors on one device, got some on {_NAME} and some on the CPU"
            f" (shape {list(strangers[0].shape)})"
        )
    return bool(elsewhere)


def _empty(size: Any, **kwargs: Any) -> Any:
    return _compute(torch.ops.aten.empty.memory_format, (size,), kwargs)


def _empty_strided(size: Any, stride: Any, **kwargs: Any) -> Any:
    return _compute(torch.ops.aten.empty_strided.default, (size, stride), kwargs)


def _copy_from(source: Tensor, target: Tensor, *_: object, **__: object) -> Tensor:
    result: Tensor = _compute(torch.ops.aten.copy_.default, (target, source), {})
    return result


# Factory functions have no tensor arguments, so they do not reach `__torch_dispatch__`.
_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
