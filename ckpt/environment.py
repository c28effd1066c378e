"""What else than state decides the bits of a training: versions, threads, CPU and GPU modes."""

from __future__ import annotations

import os
import platform
import socket
import sys
from importlib import metadata
from typing import Any

import torch

_PACKAGES = ("numpy", "safetensors", "xxhash")


def versions() -> dict[str, str]:
    """Versions of Python, torch and what the engine stores data with."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def environment() -> dict[str, Any]:
    """What changes bits between otherwise equal runs, as plain values; never starts a device."""
    found: dict[str, Any] = {
        "platform": f"{sys.platform}-{platform.machine()}",
        "host": socket.gethostname(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": bool(torch.backends.mkldnn.is_available()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What changed between two environments or version lists and may change bits, one line each."""
    names = [name for name in sorted({*then, *now}) if name != "host" and then.get(name) != now.get(name)]
    return [f"{name} was {then.get(name)}, is {now.get(name)}" for name in names]
