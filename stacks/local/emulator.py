"""Runs the AWS emulator so that a kill loses nothing, as the services that it stands for would not.

By itself it saves its state on an orderly stop only. Here every DynamoDB write is also appended to a journal, which
is replayed over the last saved state at the next start, and the rest is saved a moment after it changed. The
journal is written without a sync: it survives the process, not the machine.

Run by the emulator's own Python (`backends.ministack_command`), which has nothing of this project.
"""

import asyncio
import hashlib
import json
import os
from pathlib import Path

from ministack import app as emulator
from ministack.core import persistence
from ministack.core.responses import get_account_id, get_region, set_request_account_id, set_request_region

STATE = Path(persistence.STATE_DIR)
ITEM_WRITES = (
    "PutItem",
    "UpdateItem",
    "DeleteItem",
    "BatchWriteItem",
    "TransactWriteItems",
    "ExecuteStatement",
    "BatchExecuteStatement",
    "ExecuteTransaction",
)
READS = ("Get", "List", "Describe", "Query", "Scan", "BatchGet", "TransactGet", "Head", "Lookup")
SAVE_AFTER_SECONDS = 0.1
MOST_JOURNAL_BYTES = 64 * 1024 * 1024
"""The whole state is saved then, which stops the emulator for about a second."""


class Journal:
    """Successful DynamoDB writes since the state was saved, in order, one JSON document a line.

    The first line names the saved state that it goes on from, so that a journal older than the state is not
    replayed over it.
    """

    def __init__(self) -> None:
        self._path, self._base = STATE / "dynamodb.journal", STATE / "dynamodb.json"
        self._file: int | None = None
        self._size = 0

    def begin(self) -> None:
        """Start anew from the state as it is saved now."""
        self.close()
        STATE.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = 0
        self._write({"base": self._identity()})

    def append(self, target: str, body: bytes) -> None:
        """Note a write that was carried out. Saves everything when the journal has grown long."""
        self._write(
            {"account": get_account_id(), "region": get_region(), "target": target, "body": body.decode("utf-8")}
        )
        if self._size > MOST_JOURNAL_BYTES:
            save(["dynamodb"])
            self.begin()

    def entries(self) -> list[dict[str, str]]:
        """What is to be replayed; a line that a kill cut in half was never acknowledged."""
        if not self._path.exists():
            return []
        lines = self._path.read_bytes().split(b"\n")[:-1]
        if not lines or json.loads(lines[0])["base"] != self._identity():
            return []
        return [json.loads(line) for line in lines[1:]]

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, entry: dict[str, object]) -> None:
        if self._file is not None:
            self._size += os.write(self._file, json.dumps(entry).encode() + b"\n")

    def _identity(self) -> list[int]:
        if not self._base.exists():
            return []
        found = self._base.stat()
        return [found.st_ino, found.st_size, found.st_mtime_ns]


class SentBefore:
    """What a transaction with a client token asked for: equal to the same request, sent again.

    The emulator compares with its stored items themselves, which later writes change, and so refuses a repetition
    that DynamoDB answers.
    """

    def __init__(self, body: bytes) -> None:
        request = json.loads(body)
        self._token = request.pop("ClientRequestToken", None)
        self._digest = self._of(request)

    def __eq__(self, other: object) -> bool:
        return self._of(other) == self._digest

    __hash__ = None  # type: ignore[assignment] - compared, never looked up

    def note(self) -> None:
        """Put it in the place of what the emulator noted."""
        noted = emulator._get_module("dynamodb")._txn_idempotency.get(self._token) if self._token else None
        if noted is not None:
            noted["signature"] = self

    @staticmethod
    def _of(request: object) -> bytes:
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()


class Saver:
    """Saves services a moment after they changed."""

    def __init__(self) -> None:
        self._changed: set[str] = set()
        self._soon: asyncio.TimerHandle | None = None

    def changed(self, service: str) -> None:
        """Save it soon; changes that follow closely are saved together."""
        self._changed.add(service)
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(SAVE_AFTER_SECONDS, self._save)

    def _save(self) -> None:
        changed, self._changed, self._soon = self._changed, set(), None
        alone = {"cognito-idp": "cognito", "cognito": "cognito", "s3": "s3", "sqs": "sqs"}
        if changed <= alone.keys():
            save([alone[service] for service in changed])
        else:  # services make things in one another, but what was deployed changes rarely
            save([key for key in emulator._build_persistence_save_dict() if key != "dynamodb"])


def save(keys: list[str]) -> None:
    """Save these parts of the state."""
    found = emulator._build_persistence_save_dict()
    persistence.save_all({key: found[key] for key in keys if key in found})


def action_of(headers: dict[str, str]) -> str:
    """The operation of a JSON-protocol request, empty for others."""
    return headers.get("x-amz-target", "").rpartition(".")[2]


def journalling(journal, original):
    """DynamoDB's handler, noting writes. It runs a request without giving way, so the order is the order of effect."""

    async def handle(method, path, headers, body, query):
        answer = await original(method, path, headers, body, query)
        action = action_of(headers)
        if answer[0] == 200 and not action.startswith(READS):
            if action in ITEM_WRITES:
                journal.append(headers["x-amz-target"], body)
                if action == "TransactWriteItems":
                    SentBefore(body).note()
            else:  # tables: made rarely, with names and times of their own
                save(["dynamodb"])
                journal.begin()
        return answer

    return handle


def saving(saver, service, original):
    """Another service's handler, noting changes."""

    async def handle(method, path, headers, body, query):
        answer = await original(method, path, headers, body, query)
        reads = method in ("GET", "HEAD") or action_of(headers).startswith(READS) or "/invocations" in path
        if answer[0] < 300 and not reads:
            saver.changed(service)
        return answer

    return handle


async def replay(journal: Journal) -> None:
    """Carry out again what was noted, and save the result."""
    handler = emulator._get_module("dynamodb").handle_request
    entries = journal.entries()
    for entry in entries:
        set_request_account_id(entry["account"])
        set_request_region(entry["region"])
        body = entry["body"].encode()
        await handler("POST", "/", {"x-amz-target": entry["target"]}, body, {})
        if entry["target"].endswith("TransactWriteItems"):
            SentBefore(body).note()
    if entries:
        save(["dynamodb"])


def durable(app, journal: Journal):
    """The emulator's ASGI application, replaying before it answers and ending the journal after it saved."""

    async def run(scope, receive, send):
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return

        async def after(message):
            if message["type"] == "lifespan.startup.complete":
                await replay(journal)
                journal.begin()
            elif message["type"] == "lifespan.shutdown.complete":
                journal.close()
            await send(message)

        await app(scope, receive, after)

    return run


def main() -> None:
    journal, saver = Journal(), Saver()
    for service, original in list(emulator.SERVICE_HANDLERS.items()):
        if service == "dynamodb":
            emulator.SERVICE_HANDLERS[service] = journalling(journal, original)
        else:
            emulator.SERVICE_HANDLERS[service] = saving(saver, service, original)
    emulator.app = durable(emulator.app, journal)
    emulator.main()


if __name__ == "__main__":
    main()
