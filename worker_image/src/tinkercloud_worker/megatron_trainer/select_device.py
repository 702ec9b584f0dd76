"""Selects the device that megatron-core runs on."""

from tinkercloud_worker.device import accelerator
from tinkercloud_worker.megatron_trainer.device import Device
from tinkercloud_worker.model.architecture import UnsupportedModelError


def device_of(name: str) -> Device:
    """Return a device by the name it has in a head's configuration.

    Raises:
        UnsupportedModelError: this process has no such device.
    """
    # Each patches or initialises what the other must not.
    if name == "cpu":
        from tinkercloud_worker.megatron_trainer.cpu import Cpu  # noqa: PLC0415

        return Cpu()
    from tinkercloud_worker.megatron_trainer.gpu import Gpu  # noqa: PLC0415

    if not accelerator.is_available():
        raise UnsupportedModelError(
            f"trainer.device: {name!r}, but this rank has no GPU; give the trainer pods GPUs, or"
            " set it to 'cpu'"
        )
    return Gpu()
