"""Fixtures that many tests share."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # `make test` fills the cores with tests, not with threads

import torch

if not torch.cuda.is_available():  # then CUDA kernels run on the CPU; must be set before triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may wait for a network

import random
import secrets
import shutil
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from gare import GARE, GareConfig
from same_examples import use_no_constants_of_ours

settings.register_profile(
    "gare",
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],  # it tells of a busy machine, not of a test
)
settings.load_profile("gare")
use_no_constants_of_ours()

_OTHER_CACHES = {
    "HF_HOME": "huggingface",
    "PIP_CACHE_DIR": "pip",
    "PLAYWRIGHT_BROWSERS_PATH": "ms-playwright",
    "TORCH_HOME": "torch",
    "UV_CACHE_DIR": "uv",
}

_PATIENT_RAY = {
    "RAY_worker_niceness": "0",  # Ray's 15 is next to nothing on a busy machine
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_memory_monitor_refresh_ms": "0",  # Ray ends processes where others fill the memory
    "RAY_local_fs_capacity_threshold": "1",
}
"""How Ray is started in tests: by itself, it ends what starts slowly, and what runs on a full machine."""


def _leave_the_users_files_alone() -> Path:
    """What `gare` measures and keeps goes to a cache of this run; others find theirs where they were.

    Ray would write a token to the home of the user, unless it has one.
    """
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for variable, name in _OTHER_CACHES.items():
        if (users / name).is_dir():
            os.environ.setdefault(variable, str(users / name))
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    for variable, value in _PATIENT_RAY.items():
        os.environ.setdefault(variable, value)
    cache = Path(tempfile.mkdtemp(prefix="gare-tests-"))
    os.environ["XDG_CACHE_HOME"] = str(cache)
    return cache


_CACHE = _leave_the_users_files_alone()
SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same numbers whatever ran before it in its process, which differs from run to run."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("highest")  # libraries and scripts set it for the whole process


@pytest.fixture(scope="session")
def shared() -> Path:
    """The reference files beside the checkout; tests that need them are skipped only where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the folder ../shared (golden files, annotations, data) is not beside this checkout")
    return SHARED


@pytest.fixture
def tiny_model() -> GARE:
    torch.manual_seed(0)
    return GARE(GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 2}})).eval()
