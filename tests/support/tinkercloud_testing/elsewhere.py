"""A device that is not the CPU, on machines that have none: `elsewhere`.

Its tensors hold real numbers, and refuse what a GPU's would: to be computed with together with the
CPU's, or to be read by NumPy. So code that forgets where its tensors are fails here as it would
there. What is not like a GPU: its speed, its kernels, that it computes as it is told to.

To import this module is to make it the process's accelerator, which can't be undone: import it in a
process of its own.
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
"""Their indices, and only those, may lie on the CPU: as it is with CUDA."""


class _Backend(_DummyBackendModule):
    """What torch asks of an accelerator's module."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the types of mixed precision, for which layers computed again ask."""
        return [torch.float16, torch.bfloat16]


_setup_privateuseone_for_python_backend(_NAME, backend_module=_Backend())
# A module that is converted gets other tensors: the numbers behind these can't be exchanged.
torch.__future__.set_swap_module_params_on_conversion(True)

DEVICE = torch.device(_NAME, 0)


class _Elsewhere(torch.Tensor):
    """A tensor that says it is there, and keeps its numbers in one that is here."""

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
        """Return the numbers, which also a GPU's tensor brings here by itself."""
        return self.here.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return what tells two tensors that share memory from two that do not."""
        return self.here.untyped_storage()

    def data_ptr(self) -> int:
        """Return an address, as a GPU's tensor has one."""
        return self.here.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # as torch documents it
        cls, operation: Any, _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _compute(operation, args, kwargs or {})


def _compute(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the CPU, and say that its results are where they would be."""
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
        # What is changed in place stays the tensor it was.
        return known[id(value)] if id(value) in known else _Elsewhere(value)

    is_there = _is_there(name, (args[:1], kwargs) if name in _INDEXES else (args, kwargs))
    args, kwargs = tree_map(here, (args, kwargs))
    if kwargs.get("device") is not None:
        is_there = torch.device(kwargs["device"]).type == _NAME
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = operation(*args, **kwargs)
    return tree_map(there, result) if is_there else result


def _is_there(name: str, arguments: Any) -> bool:
    """Return where an operation is to run.

    Raises:
        RuntimeError: its tensors are on two devices.
    """
    tensors = [value for value in tree_leaves(arguments) if isinstance(value, Tensor)]
    if name == "copy_":
        return isinstance(tensors[0], _Elsewhere)
    elsewhere = [tensor for tensor in tensors if isinstance(tensor, _Elsewhere)]
    # A GPU computes with a number that lies on the CPU.
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


# What makes tensors has none among its arguments, and so does not reach `__torch_dispatch__`.
_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
