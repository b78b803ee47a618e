"""Identifiers and time: opaque, time-ordered, URL-safe ids and RFC 3339 timestamps."""

import secrets
import time
from datetime import UTC, datetime

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32, lower case
_LENGTH = 26  # 48 bits of milliseconds and 80 random bits, as in a ULID


def new_id(prefix: str, now_ms: int | None = None) -> str:
    """A new id such as `gen_01k…`: sorts by creation time, unguessable (80 random bits)."""
    millis = int(time.time() * 1000) if now_ms is None else now_ms
    number = (millis << 80) | secrets.randbits(80)
    digits = [_ALPHABET[(number >> (5 * place)) & 31] for place in reversed(range(_LENGTH))]
    return f"{prefix}_{''.join(digits)}"


def now_ms() -> int:
    """Milliseconds since the epoch, UTC."""
    return int(time.time() * 1000)


def rfc3339(millis: int) -> str:
    """`2026-11-30T12:00:00.123Z`: fixed width, so that text order is time order."""
    moment = datetime.fromtimestamp(millis / 1000, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{millis % 1000:03d}Z"


def utc_day(millis: int) -> str:
    """The UTC calendar day, `2026-11-30`."""
    return datetime.fromtimestamp(millis / 1000, UTC).strftime("%Y-%m-%d")
