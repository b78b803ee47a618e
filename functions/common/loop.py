"""One event loop for the life of the process: connections made in one invocation serve the next."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")

_loop = asyncio.new_event_loop()


def run(work: Awaitable[Result]) -> Result:
    """Run to the end on the process's loop."""
    return _loop.run_until_complete(work)
