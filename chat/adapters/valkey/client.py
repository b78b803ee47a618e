"""One Valkey cluster client for a process: slot map, deadlines, errors of the domain, scripts by digest."""

import asyncio
import binascii
import contextlib
import hashlib
import logging
import random
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from chat.adapters.valkey.node import Address, NodeConnection, ReplyError, open_node
from chat.errors import Unavailable

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 2.0
"""How long a caller waits for one command, retries included, before it hears Unavailable."""

STALE_SECONDS = 240.0
"""A connection unused for so long may have been forgotten by the network: it is opened anew."""

SLOTS = 16384
_SCRIPTS = Path(__file__).parent / "lua"
_PASSING = frozenset({"LOADING", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "READONLY", "BUSY"})
_FULL = frozenset({"OOM", "MISCONF", "NOREPLICAS"})


class CommandError(Exception):
    """Valkey refused a command for good: a fault of ours."""


class Script:
    """A Lua file and its digest. All its keys share one hash tag."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = (_SCRIPTS / f"{name}.lua").read_text()
        self.digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


def slot_of(key: str) -> int:
    """The hash slot of a key: of its hash tag, where it has one."""
    start = key.find("{")
    if start >= 0:
        end = key.find("}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key.encode(), 0) % SLOTS


def unavailable() -> Unavailable:
    """What a caller is told while Valkey is away."""
    return Unavailable("The live store does not answer; try again.")


class Valkey:
    """A lazily connected cluster client: one connection a primary, found anew whenever the cluster changes.

    Every method raises Unavailable when the cluster does not answer within the deadline.
    """

    def __init__(self, url: str, password: str, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise ValueError(f"a Valkey URL is redis://host:port or rediss://host:port, not {url!r}")
        # The seed is kept for good: behind a configuration endpoint its name outlives every node.
        self._seed: Address = (parts.hostname, parts.port or 6379)
        self.tls, self.password = parts.scheme == "rediss", password
        self.deadline_seconds = deadline_seconds
        self._slots: list[Address | None] = [None] * SLOTS
        self._known = False
        self._connections: dict[Address, NodeConnection] = {}
        self._resting: dict[Address, list[NodeConnection]] = {}
        self._shared: dict[Any, asyncio.Task[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, script: Script, keys: list[str], arguments: list[Any]) -> Any:
        """Run a script by digest, and load it where a node does not have it."""
        answer = await self._execute(keys[0], ("EVALSHA", script.digest, len(keys), *keys, *arguments))
        if isinstance(answer, ReplyError):  # NOSCRIPT
            answer = await self._execute(keys[0], ("EVAL", script.source, len(keys), *keys, *arguments))
        return answer

    async def command(self, name: str, key: str, *arguments: Any) -> Any:
        """A command whose first argument is its key. Raises CommandError when it is refused."""
        return await self._execute(key, (name, key, *arguments))

    async def blocking(self, name: str, key: str, seconds: float) -> Any:
        """A command such as BLPOP on a connection of its own; a cancelled call closes it."""
        return await self._execute(key, (name, key, seconds), blocking=seconds)

    async def _execute(self, key: str, words: tuple[Any, ...], blocking: float | None = None) -> Any:
        loop = self._on_this_loop()
        slot, end, pause = slot_of(key), loop.time() + self.deadline_seconds, 0.01
        asked: Address | None = None
        fault: Exception
        while True:
            try:
                answer = await self._once(slot, words, blocking, asked)
            except (OSError, TimeoutError) as error:
                self._known, asked, fault = False, None, error
            else:
                if not isinstance(answer, ReplyError):
                    return answer
                code, _, rest = str(answer).partition(" ")
                if code == "NOSCRIPT":
                    return answer
                if code in _FULL:
                    raise unavailable() from answer
                if code not in _PASSING and code not in ("MOVED", "ASK"):
                    raise CommandError(f"{words[0]}: {answer}") from answer
                fault, asked = answer, self._redirected(code, rest, slot)
                if asked is not None and loop.time() < end:
                    continue
            if loop.time() + pause >= end:
                raise unavailable() from fault
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, 0.4)

    def _on_this_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop. Connections of another one, such as a Lambda's last call had, are forgotten."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._known = loop, False
            self._connections, self._resting, self._shared = {}, {}, {}
        return loop

    def _redirected(self, code: str, rest: str, slot: int) -> Address | None:
        """Note what an error says about the cluster; the node to ask once instead, if it names one."""
        self._known = self._known and code not in ("MOVED", "CLUSTERDOWN", "MASTERDOWN", "READONLY")
        if code not in ("MOVED", "ASK"):
            return None
        host, _, port = rest.partition(" ")[2].rpartition(":")
        address = (host or self._seed[0], int(port))
        if code == "MOVED":
            self._slots[slot] = address
        return address

    async def _once(self, slot: int, words: tuple[Any, ...], blocking: float | None, asked: Address | None) -> Any:
        if asked is None:
            if not self._known:
                await self._together("discover", self._discover)
            address = self._slots[slot]
            if address is None:
                self._known = False
                raise ConnectionError(f"no node has slot {slot}")
        else:
            address = asked
        if blocking is not None:
            async with self._own(address, blocking) as own:
                return await own.send(words)
        connection = await self._connection(address)
        if asked is not None:
            connection.send(("ASKING",)).add_done_callback(_retrieve)
        return await connection.send(words)

    async def _connection(self, address: Address) -> NodeConnection:
        known = self._connections.get(address)
        if known is not None and known.alive:
            if asyncio.get_running_loop().time() - known.used_at < STALE_SECONDS:
                return known
            known.abort()

        async def make() -> NodeConnection:
            made = await open_node(address, self.password, self.tls, self.deadline_seconds)
            self._connections[address] = made
            return made

        opened: NodeConnection = await self._together(address, make)
        return opened

    @contextlib.asynccontextmanager
    async def _own(self, address: Address, seconds: float) -> AsyncIterator[NodeConnection]:
        """A connection for one blocking command; used again unless the command was broken off."""
        resting = self._resting.setdefault(address, [])
        own = resting.pop() if resting else None
        if own is None or not own.alive:
            own = await open_node(address, self.password, self.tls, self.deadline_seconds)
        own.patience = seconds + self.deadline_seconds
        try:
            yield own
        except BaseException:
            own.abort()
            raise
        resting.append(own)

    async def _together(self, name: Any, work: Any) -> Any:
        """Run `work` once for all who wait for it now, whoever of them is cancelled."""
        task = self._shared.get(name)
        if task is None:
            made: Coroutine[Any, Any, Any] = work()
            task = self._shared[name] = asyncio.get_running_loop().create_task(made)
            task.add_done_callback(_retrieve)
            task.add_done_callback(lambda _: self._shared.pop(name, None))
        return await asyncio.shield(task)

    async def _discover(self) -> None:
        """Read the slot map from the seed, or from any node that was known. Raises OSError, TimeoutError."""
        fault: Exception | None = None
        for address in dict.fromkeys([self._seed, *self._connections]):
            try:
                connection = await self._connection(address)
                rows = await connection.send(("CLUSTER", "SLOTS"))
                if isinstance(rows, ReplyError):
                    raise ConnectionError(str(rows))
            except (OSError, TimeoutError) as error:
                fault = error
                continue
            self._learn(rows, address)
            return
        raise fault or ConnectionError("no node is known")

    def _learn(self, rows: list[Any], told_by: Address) -> None:
        slots: list[Address | None] = [None] * SLOTS
        for first, last, primary, *_ in rows:
            address = (self._host_of(primary) or told_by[0], int(primary[1]))
            slots[first : last + 1] = [address] * (last + 1 - first)
        self._slots, self._known = slots, True
        needed = {self._seed, *slots}
        for address in [one for one in self._connections if one not in needed]:
            self._connections.pop(address).abort()
        for address in [one for one in self._resting if one not in needed]:
            for own in self._resting.pop(address):
                own.abort()

    def _host_of(self, node: list[Any]) -> str:
        """A node's host as CLUSTER SLOTS tells it; with TLS its name, which is what certificates have."""
        more = node[3] if len(node) > 3 and isinstance(node[3], list) else []
        names = dict(zip(more[::2], more[1::2], strict=False))
        host = (names.get(b"hostname") if self.tls else None) or node[0] or b""
        return "" if host == b"?" else str(host.decode())

    async def node_of(self, key: str, refresh: bool = False) -> Address:
        """Address of the primary that has the key's slot; `refresh` asks the cluster anew."""
        self._on_this_loop()
        if refresh:
            self._known = False
        if not self._known:
            try:
                await self._together("discover", self._discover)
            except (OSError, TimeoutError) as error:
                raise unavailable() from error
        address = self._slots[slot_of(key)]
        if address is None:
            self._known = False
            raise unavailable()
        return address

    async def close(self) -> None:
        """Close every connection."""
        self._on_this_loop()
        for task in list(self._shared.values()):
            task.cancel()
        for connection in [*self._connections.values(), *(one for all in self._resting.values() for one in all)]:
            connection.abort()
        self._connections.clear()
        self._resting.clear()


def _retrieve(future: "asyncio.Future[Any]") -> None:
    """Look at an outcome that nobody may be waiting for, so that it is not reported as forgotten."""
    if not future.cancelled():
        future.exception()


def connect(url: str, password: str = "", deadline_seconds: float = DEADLINE_SECONDS) -> Valkey:
    """A client for `redis://` or `rediss://host:port`. Does not connect yet, so that Valkey may be away at start."""
    return Valkey(url, password, deadline_seconds)
