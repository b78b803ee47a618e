"""Marks of the stages that a generation passes, for the latency budget that `make bench-path` prints.

Off by default. When on, each mark is one JSON line on standard error with the wall clock in microseconds; all
processes of one machine share that clock, so that marks of different processes can be subtracted.
"""

import sys
import time

_enabled = False


def enable(on: bool) -> None:
    """Switch marks on or off for this process."""
    global _enabled  # noqa: PLW0603 - one switch a process, set once at start
    _enabled = on


def mark(generation_id: str, stage: str, at_us: int | None = None) -> None:
    """Note that the generation reached `stage` now, or at `at_us` (epoch microseconds)."""
    if _enabled:
        at = time.time_ns() // 1000 if at_us is None else at_us
        sys.stderr.write(f'{{"generationId":"{generation_id}","stage":"{stage}","atMicros":{at}}}\n')
        sys.stderr.flush()


def clock_us() -> int:
    """Epoch microseconds, to mark a stage before its generation has an id."""
    return time.time_ns() // 1000
