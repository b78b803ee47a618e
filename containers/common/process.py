"""What every container process does: structured logs, signals, an HTTP server beside its work."""

import asyncio
import contextlib
import gc
import json
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from chat.settings import SettingsError

GC_THRESHOLDS = (20_000, 20, 50)
"""With thousands of open streams a full collection stops the process for tens of milliseconds; little of what
they allocate is in cycles."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line. Messages are ours; bodies and tokens are never logged."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logging() -> None:
    """Log to standard error as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("botocore", "aiobotocore", "httpx", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def stop_event() -> asyncio.Event:
    """Set by SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, stopping.set)
    return stopping


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def serving(app: Any, host: str, port: int, **options: Any) -> AsyncIterator[uvicorn.Server]:
    """Serve an ASGI application inside the block."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        proxy_headers=False,
        **options,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if task.done():
            raise SystemExit(f"cannot listen on {host}:{port}")
        gc.collect()
        gc.freeze()
        yield server
    finally:
        server.should_exit = True
        await task


def run(main: Any) -> None:
    """Run an asynchronous main that answers an exit status; settings at fault end it with a clear line."""
    set_up_logging()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        import uvloop  # not in every environment that runs this

        status = uvloop.run(main())
    except SettingsError as error:
        sys.exit(f"settings: {error}")
    sys.exit(status)
