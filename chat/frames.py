"""Server-sent-event frames: rendered once by whoever produces an event, forwarded as bytes by everybody else.

A durable frame is `id: <seq>\\nevent: <kind>\\ndata: <json>\\n\\n`. The head is fixed, so that a reader finds
the sequence number and the kind without parsing JSON.
"""

from typing import Any

import msgspec

from chat.model import EventKind

RETRY = b"retry: 1000\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def durable(seq: int, kind: EventKind, data: Any) -> bytes:
    """The frame of a stored event; `data` is anything msgspec encodes."""
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (seq, kind.encode(), msgspec.json.encode(data))


def transient(kind: EventKind, data: Any) -> bytes:
    """The frame of an event without an id."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(data))


def seq_of(frame: bytes) -> int:
    """The sequence number of a durable frame."""
    return int(frame[4 : frame.index(b"\n")])


def kind_of(frame: bytes) -> EventKind:
    """The kind of a durable frame."""
    start = frame.index(b"\nevent: ") + 8
    return EventKind(frame[start : frame.index(b"\n", start)].decode())


def is_last(frame: bytes) -> bool:
    """Whether the stream ends with this frame."""
    start = frame.index(b"\nevent: ") + 8
    return frame.startswith((b"done\n", b"error\n"), start)


def data_of(frame: bytes) -> Any:
    """The decoded JSON of a frame."""
    start = frame.index(b"\ndata: ") + 7
    return msgspec.json.decode(frame[start:-2])
