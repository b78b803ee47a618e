"""Streamer processes for tests, an issuer of tokens, and a client on raw sockets."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from chat.settings import ModelSpec, PlanSpec, StoreSettings
from stacks.local import backends
from stacks.local.issuer import Issuer

PLANS = [PlanSpec("free", 1, 2000), PlanSpec("plus", 0, 8000)]
MODELS = [ModelSpec("sim-large", "large", 8000, ["free", "plus"], 1.0, 2.0)]
ISSUER, AUDIENCE = "https://issuer.test", "chat"


class Streamer:
    """A process, as its container starts it."""

    def __init__(self, settings: StoreSettings, issuer: Issuer, valkey_port: int, log: Path, **more: object) -> None:
        self.port, self.issuer, self.log = backends.free_port(), issuer, log
        values = msgspec.structs.asdict(settings) | {
            "valkey_url": f"redis://127.0.0.1:{valkey_port}",
            "models": msgspec.json.encode(MODELS).decode(),
            "plans": msgspec.json.encode(PLANS).decode(),
            "oidc_issuer": ISSUER,
            "oidc_audience": AUDIENCE,
            "jwks_url": issuer.url,
            "host": "127.0.0.1",
            "port": self.port,
            **more,
        }
        environment = {name.upper(): str(value) for name, value in values.items() if name != "trace_stages"}
        command = backends.Command(
            [sys.executable, "-m", "containers.streamer.app"],
            {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "PATH"))} | environment,
            backends.ROOT,
        )
        self.process = backends.start(command, log)

    async def until_healthy(self) -> "Streamer":
        async with asyncio.timeout(30):
            while True:
                assert self.process.poll() is None, self.log.read_text()
                try:
                    if (await self.ask("GET", "/healthz")).status == 200:
                        return self
                except OSError:
                    await asyncio.sleep(0.05)

    async def ask(
        self, method: str, path: str, body: object = None, *, user: str | None = "ada", **headers: str
    ) -> "Answer":
        """One request on a connection of its own; answers once the head is there."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        head = {"Host": "test", "Content-Type": "application/json", "Content-Length": str(len(raw))}
        if user is not None:
            head["Authorization"] = f"Bearer {self.issuer.token(user)}"
        head |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=4096)
        writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + raw)
        return await Answer.begin(reader, writer)

    def send(self, conversation_id: str, content: str, ident: str) -> Any:
        path = f"/v1/conversations/{conversation_id}/messages"
        return self.ask("POST", path, {"content": content, "clientMessageId": ident})

    def follow(self, generation_id: str, after: int | None = None, user: str = "ada") -> Any:
        headers = {} if after is None else {"Last_Event_ID": str(after)}
        return self.ask("GET", f"/v1/generations/{generation_id}/stream", user=user, **headers)

    def tell_to_stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def stopped(self, seconds: float) -> int:
        return await asyncio.to_thread(self.process.wait, seconds)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class Answer:
    """The head of an answer; its body is read when asked for, so that a test can be a slow client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.whole = False

    @classmethod
    async def begin(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> "Answer":
        made = cls(reader, writer)
        async with asyncio.timeout(20):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        made.status = int(head[0].split()[1])
        for line in head[1:]:
            name, _, value = line.partition(":")
            made.headers[name.lower()] = value.strip()
        return made

    async def more(self) -> bool:
        """Read one chunk; False at the end of the body."""
        if "content-length" in self.headers:
            self.body += await self._reader.readexactly(int(self.headers["content-length"]))
            self.whole = True
            return False
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        self.body += await self._reader.readexactly(size)
        await self._reader.readexactly(2)
        self.whole = size == 0
        return size > 0

    async def rest(self, seconds: float = 20) -> "Answer":
        """Everything up to the end, and the connection closed."""
        async with asyncio.timeout(seconds):
            while await self.more():
                pass
        await self.hang_up()
        return self

    async def until(self, wanted: bytes, seconds: float = 20) -> "Answer":
        async with asyncio.timeout(seconds):
            while wanted not in self.body:
                assert await self.more(), self.body[-500:]
        return self

    async def hang_up(self) -> None:
        self._writer.close()

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def durable(self) -> list[bytes]:
        return [bytes(one) + b"\n\n" for one in self.body.split(b"\n\n") if one.startswith(b"id: ")]
