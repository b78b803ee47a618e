"""A small client of the public API for end-to-end tests."""

import json
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = httpx.Timeout(10, read=120)


@dataclass(frozen=True)
class Event:
    """A server-sent event (or a comment, kind `:`), with the client's clock at its arrival in seconds."""

    kind: str
    id: int | None
    data: dict
    at: float


@dataclass(frozen=True)
class Service:
    """A running service: where it answers and where its state lies."""

    base_url: str
    local_dir: Path

    def token(self, user: str, plan: str) -> str:
        made = subprocess.run(
            ["make", "-s", "token", f"USER={user}", f"PLAN={plan}", f"LOCAL_DIR={self.local_dir}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return made.stdout.split()[-1]

    def user(self, plan: str = "plus") -> "User":
        return User(self, self.token("u" + uuid.uuid4().hex[:10], plan))

    def pid(self, process: str) -> int:
        return int((self.local_dir / "run" / f"{process}.pid").read_text())

    def log(self, process: str) -> str:
        return (self.local_dir / "log" / f"{process}.log").read_text(errors="replace")


class User:
    """A signed-in person."""

    def __init__(self, service: Service, token: str) -> None:
        self.service, self.token = service, token
        self.http = httpx.Client(
            base_url=service.base_url, timeout=TIMEOUT, headers={"Authorization": f"Bearer {token}"}
        )

    def conversation(self) -> str:
        response = self.http.post("/v1/conversations", json={})
        assert response.status_code == 201, response.text
        return str(response.json()["conversationId"])

    @contextmanager
    def send(self, conversation: str, content: str, **body: object) -> Iterator[httpx.Response]:
        body = {"content": content, "clientMessageId": uuid.uuid4().hex} | body
        with self.http.stream("POST", f"/v1/conversations/{conversation}/messages", json=body) as response:
            yield response

    def ask(self, conversation: str, content: str, **body: object) -> list[Event]:
        with self.send(conversation, content, **body) as response:
            if response.status_code != 200:
                response.read()
                raise AssertionError(f"{response.status_code} {response.text}")
            return list(events(response))

    @contextmanager
    def follow(self, generation: str, after: int | None = None) -> Iterator[httpx.Response]:
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        with self.http.stream("GET", f"/v1/generations/{generation}/stream", headers=headers) as response:
            yield response

    def follow_to_the_end(self, generation: str, seen: list[Event], seconds: float) -> list[Event]:
        """Reconnect after every break until the last event, at most for `seconds`."""
        end = time.monotonic() + seconds
        while not (seen and seen[-1].kind in ("done", "error")) and time.monotonic() < end:
            after = max((event.id for event in seen if event.id), default=None)
            try:
                with self.follow(generation, after) as response:
                    if response.status_code == 200:
                        seen += [event for event in events(response) if event.id is not None]
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        return seen

    def messages(self, conversation: str) -> list[dict]:
        """The newest page of history, oldest first."""
        page = self.http.get(f"/v1/conversations/{conversation}/messages", params={"limit": 100})
        assert page.status_code == 200, page.text
        return list(page.json()["data"][::-1])


def events(response: httpx.Response) -> Iterator[Event]:
    """Parse a stream as it arrives."""
    kind, ident, data = "message", None, ""
    for line in response.iter_lines():
        if line.startswith(":"):
            yield Event(":", None, {}, time.monotonic())
        elif not line:
            if data:
                yield Event(kind, ident, json.loads(data), time.monotonic())
            kind, ident, data = "message", None, ""
        else:
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "id":
                ident = int(value)
            elif name == "data":
                data = value


def text_of(seen: list[Event]) -> str:
    return "".join(event.data["text"] for event in seen if event.kind == "delta")


def wait_for(check: Callable[[], object], seconds: float, what: str) -> object:
    """Poll until `check` answers something true. Raises AssertionError naming `what`."""
    end = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"still not after {seconds} s: {what}")
        time.sleep(0.05)
