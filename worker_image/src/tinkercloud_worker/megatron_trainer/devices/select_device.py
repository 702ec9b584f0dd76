"""Selects the device that megatron-core runs on."""

from tinkercloud_worker.device import accelerator
from tinkercloud_worker.megatron_trainer.devices.device import Device
from tinkercloud_worker.model.architecture import UnsupportedModelError


def device_of(name: str) -> Device:
    """Return a device by its name in the configuration of a session head.

    Raises:
        UnsupportedModelError: this process has no such device.
    """
    # Imported only when needed, because each module patches or initializes global state.
    if name == "cpu":
        from tinkercloud_worker.megatron_trainer.devices.cpu import Cpu  # noqa: PLC0415

        return Cpu()
    from tinkercloud_worker.megatron_trainer.devices.gpu import Gpu  # noqa: PLC0415

    if not accelerator.is_available():
        raise UnsupportedModelError(
            f"trainer.device: {name!r} needs a GPU, but this rank has none; request GPUs for the"
            " trainer pods, or set trainer.device to 'cpu'"
        )
    return Gpu()
