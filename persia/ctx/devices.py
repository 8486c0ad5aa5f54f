"""Devices by number; torch is loaded when there is one to ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia.errors import (
    ConfigError,
)

if TYPE_CHECKING:
    import torch


def usable_device(device_id: int | None) -> int | None:
    """Return the device's number, selected in torch, or None for the CPU."""
    if device_id is None or device_id < 0:
        return None
    import torch

    count = torch.cuda.device_count()
    if device_id >= count:
        raise ConfigError(
            f"device_id: expected one of the {count} CUDA devices of this machine, "
            f"got {device_id}"
        )
    torch.cuda.set_device(device_id)
    return device_id


def torch_device(device_id: int | None) -> torch.device:
    import torch

    return torch.device("cpu") if device_id is None else torch.device("cuda", device_id)


def grad_scaler(device_id: int | None) -> torch.amp.GradScaler:
    import torch

    return torch.amp.GradScaler(torch_device(device_id).type)
