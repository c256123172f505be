"""What a measurement must say about the machine it was made on: names, versions, clocks, power, temperature."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch

import strobe

PACKAGES = (
    *("torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend"),
    "xformers",
)
_FIELDS = {
    "sm_clock_mhz": "clocks.sm",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "memory_clock_mhz": "clocks.mem",
}


def describe(device: torch.device) -> dict:
    """The device and the versions of all that takes part, as a JSON object."""
    packages = {name: _version(name) for name in PACKAGES}
    facts: dict = {"kind": device.type, "python": platform.python_version(), "packages": packages, "strobe": strobe.__version__}
    facts |= {"commit": commit()}
    if device.type == "cpu":
        return facts | {"name": "CPU", "processor": platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "driver": _nvidia_smi(["driver_version"], device)[0],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """$STROBE_COMMIT, for copies without their repository; else the checkout's commit, with "+" if its source was changed
    since; else None."""
    source = Path(strobe.__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, text=True, check=True).stdout.strip()

    if given := os.environ.get("STROBE_COMMIT"):
        return given
    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _selector(device: torch.device) -> list[str]:
    """nvidia-smi's option for this device: its UUID, since CUDA_VISIBLE_DEVICES renumbers the GPUs for torch alone."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return ["-i", f"GPU-{uuid}"] if uuid is not None else []


def _nvidia_smi(fields: list[str], device: torch.device) -> list[str | None]:
    """One answer for each field; None where nvidia-smi is absent or does not know."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *_selector(device)]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return [None] * len(fields)
    return [part.strip() for part in line.split(",")]


def snapshot(device: torch.device) -> dict[str, float]:
    """Clocks, power and temperature of a GPU now, as far as it reports them; {} on a CPU."""
    if device.type != "cuda":
        return {}
    return parse_sample(",".join(value or "" for value in _nvidia_smi(list(_FIELDS.values()), device)))


@dataclass(frozen=True)
class _Sample:
    when: float
    values: dict[str, float]


class Telemetry:
    """Clocks, power and temperature of a GPU while it works: nvidia-smi in the background, a sample every 200 ms.

    Without nvidia-smi there are no samples, and `since` returns {}.
    """

    def __init__(self, device: torch.device):
        self._device, self._samples = device, list[_Sample]()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Telemetry:
        if self._device.type == "cuda" and shutil.which("nvidia-smi"):
            query = [f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader,nounits", "-lms", "200"]
            command = ["nvidia-smi", *query, *_selector(self._device)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        if self._process is not None:
            self._process.terminate()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            sample = parse_sample(line)
            if sample:
                self._samples.append(_Sample(time.monotonic(), sample))

    def since(self, start: float) -> dict[str, float]:
        """Medians of the samples taken since `start` (time.monotonic()), and how many there were."""
        taken = [sample.values for sample in self._samples if sample.when >= start]
        if not taken:
            return {}
        by_name = {name: [values[name] for values in taken if name in values] for name in _FIELDS}
        return {name: median(values) for name, values in by_name.items() if values} | {"samples": len(taken)}


def parse_sample(line: str) -> dict[str, float]:
    """A line of nvidia-smi's CSV; without the fields that this GPU does not report ("[N/A]")."""
    parts = [part.strip() for part in line.split(",")]
    return {name: float(part) for name, part in zip(_FIELDS, parts, strict=False) if part.replace(".", "", 1).isdigit()}


class Watchdog:
    """Calls `on_hang(what)` from its own thread when `expect` was not called again in time; a GPU kernel can hang."""

    def __init__(self, on_hang: Callable[[str], None]):
        self._on_hang, self._what, self._deadline = on_hang, "", float("inf")
        self._stop = threading.Event()

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()

    def expect(self, what: str, seconds: float) -> None:
        """`what` begins now and takes less than `seconds`."""
        self._what, self._deadline = what, time.monotonic() + seconds

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            if time.monotonic() > self._deadline:
                self._deadline = float("inf")
                self._on_hang(self._what)
