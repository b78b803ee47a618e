"""Fixtures shared by all tests: real Valkey in cluster mode and the AWS emulator, each started once when asked for."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stacks.local import backends


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()


@pytest.fixture(scope="session")
def valkey_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A real Valkey in cluster mode with all slots on one node."""
    directory: Path = tmp_path_factory.mktemp("valkey")
    port = backends.free_port()
    process = backends.start(backends.valkey_command(directory, port), directory / "log")
    backends.assign_slots(port)
    yield port
    _stop(process)


@pytest.fixture(scope="session")
def ministack_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The AWS emulator."""
    directory: Path = tmp_path_factory.mktemp("ministack")
    port = backends.free_port()
    process = backends.start(backends.ministack_command(directory, port), directory / "log")
    backends.wait_for_ministack(port)
    yield port
    _stop(process)
