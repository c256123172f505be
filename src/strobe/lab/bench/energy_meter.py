"""Reads a GPU's own meter of the energy that it takes, by NVIDIA's management library (NVML), which comes with the driver."""

from __future__ import annotations

import ctypes
import threading
import time

import torch

Sample = tuple[float, int]
"""A change of the count: when it was seen (time.monotonic), and the new count, in millijoules since the driver was loaded."""


class Meter:
    """Notes in `samples` each change of the GPU's count of energy while `with Meter(device) as meter:` runs. The count changes
    only now and then. RuntimeError if NVML has no answer for this GPU."""

    def __init__(self, device: torch.device):
        self._nvml, self._handle = _handle(device)
        self.samples: list[Sample] = []
        self._stop = threading.Event()

    def __enter__(self) -> Meter:
        threading.Thread(target=self._watch, args=(self._millijoules(),), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()

    def _millijoules(self) -> int:
        found = ctypes.c_ulonglong()
        _call(self._nvml, "nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(found))
        return found.value

    def _watch(self, last: int) -> None:
        while not self._stop.wait(0.001):
            if (now := self._millijoules()) != last:
                self.samples.append((time.monotonic(), now))
                last = now


def power_limit(device: torch.device) -> float:
    """The power limit of a GPU in watts. RuntimeError if NVML has no answer for this GPU."""
    nvml, handle = _handle(device)
    found = ctypes.c_uint()
    _call(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle, ctypes.byref(found))
    return found.value / 1e3


def watts(samples: list[Sample], begin: float, end: float) -> float:
    """The mean power in watts between the first and the last sample within [begin, end]. ValueError if there are not two."""
    within = [sample for sample in samples if begin <= sample[0] <= end]
    if len(within) < 2:
        raise ValueError(
            f"the meter must change twice within the {end - begin:.1f} s measured, got {len(within)}: take more --seconds"
        )
    (first, least), (last, most) = within[0], within[-1]
    return (most - least) / 1e3 / (last - first)


def _handle(device: torch.device) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """NVML, and its handle of a GPU. The GPU is found by its UUID, as CUDA_VISIBLE_DEVICES changes numbers for torch alone."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise RuntimeError(f"energy is measured by NVML, which is not there: {error}") from None
    handle = ctypes.c_void_p()
    _call(nvml, "nvmlInit_v2")
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    _call(nvml, "nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(handle))
    return nvml, handle


def _call(nvml: ctypes.CDLL, name: str, *arguments) -> None:
    if status := getattr(nvml, name)(*arguments):
        raise RuntimeError(f"{name} of NVML failed with status {status}")
