"""Running services for end-to-end tests: each starts once a session, through `make up`, in a folder of its own.

Set `E2E_BASE_URL` and `E2E_LOCAL_DIR` to run the simulated ones against a service that is already up.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stacks.local.backends import free_port
from tests.e2e.client import ROOT, Service

FIGURES: list[str] = []
"""Measured figures against their goals; printed after the tests, whatever they are."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the figures of this run."""
    if FIGURES:
        terminalreporter.section("figures of the real engine")
        for figure in FIGURES:
            terminalreporter.line(figure)


@contextmanager
def made_up(directory: Path, **variables: object) -> Iterator[Service]:
    """`make up` with these variables; `make down` at the end. Raises with the tail of the logs."""
    port = free_port()
    assignments = [f"{name}={value}" for name, value in variables.items()]
    make = ["make", "-s", f"LOCAL_DIR={directory}", f"PORT={port}"]
    command = [*make, "up", *assignments]
    up = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    try:
        assert up.returncode == 0, f"make up failed:\n{up.stdout[-4000:]}\n{up.stderr[-4000:]}"
        yield Service(f"http://127.0.0.1:{port}", directory)
    finally:
        subprocess.run([*make, "down"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two simulated replicas, two streamers, two dispatchers."""
    if base_url := os.environ.get("E2E_BASE_URL"):
        yield Service(base_url, Path(os.environ["E2E_LOCAL_DIR"]))
        return
    directory = tmp_path_factory.mktemp("service")
    with made_up(directory, ENGINE="simulated", REPLICAS=2, STREAMERS=2, DISPATCHERS=2) as running:
        yield running


@pytest.fixture(scope="module")
def vllm_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The real engine, as `make up` starts it."""
    with made_up(tmp_path_factory.mktemp("vllm"), ENGINE="vllm") as running:
        yield running


@pytest.fixture(scope="module")
def exact_vllm_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """float32 and greedy: a continuation equals the uninterrupted reply bit for bit (docs/adr/0006)."""
    with made_up(tmp_path_factory.mktemp("exact"), ENGINE="vllm", DTYPE="float32", TEMPERATURE=0) as running:
        yield running
