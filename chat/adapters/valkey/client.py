"""One Valkey cluster client for a process: deadlines, errors of the domain, scripts by digest."""

import asyncio
import hashlib
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import (
    ClusterDownError,
    ClusterError,
    ConnectionError,
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
)

from chat.errors import Unavailable

Answer = TypeVar("Answer")

DEADLINE_SECONDS = 2.0
"""How long a caller waits for one command, retries included, before it hears Unavailable."""

_AWAY = (
    ConnectionError,
    TimeoutError,
    ClusterDownError,
    ClusterError,
    RedisClusterException,
    ReadOnlyError,
    OSError,
    asyncio.TimeoutError,
)
_SCRIPTS = Path(__file__).parent / "lua"


class Script:
    """A Lua file and its digest. All its keys share one hash tag."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = (_SCRIPTS / f"{name}.lua").read_text()
        self.digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class Valkey:
    """A lazily connected cluster client. Every method raises Unavailable when the cluster does not answer."""

    def __init__(self, url: str, password: str, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise ValueError(f"a Valkey URL is redis://host:port or rediss://host:port, not {url!r}")
        self.host, self.port = parts.hostname, parts.port or 6379
        self.tls, self.password = parts.scheme == "rediss", password
        self.deadline_seconds = deadline_seconds
        self._cluster: RedisCluster | None = None
        self._connecting = asyncio.Lock()

    async def cluster(self) -> RedisCluster:
        """The connected client; connects on first use and after a lost cluster."""
        if self._cluster is None:
            async with self._connecting:
                if self._cluster is None:
                    self._cluster = await self._connect()
        return self._cluster

    async def _connect(self) -> RedisCluster:
        # Behind a configuration endpoint the seed is a DNS name that must be kept (dynamic_startup_nodes).
        cluster = RedisCluster(
            host=self.host,
            port=self.port,
            password=self.password or None,
            ssl=self.tls,
            dynamic_startup_nodes=False,
            max_connections=512,
            socket_timeout=self.deadline_seconds,
            socket_connect_timeout=self.deadline_seconds,
            socket_keepalive=True,
        )
        try:
            await cluster.initialize()
        except BaseException:
            await cluster.aclose()
            raise
        return cluster

    async def run(self, script: Script, keys: list[str], arguments: list[Any]) -> Any:
        """Run a script by digest, and load it where a node does not have it."""

        async def attempt(cluster: RedisCluster) -> Any:
            try:
                return await cluster.evalsha(script.digest, len(keys), *keys, *arguments)
            except NoScriptError:
                return await cluster.eval(script.source, len(keys), *keys, *arguments)

        return await self.call(attempt)

    async def call(self, command: Callable[[RedisCluster], Awaitable[Answer]]) -> Answer:
        """Run a command within the deadline, trying again while the cluster changes."""
        end = time.monotonic() + self.deadline_seconds
        pause = 0.02
        while True:
            try:
                async with asyncio.timeout(max(0.05, end - time.monotonic())):
                    return await command(await self.cluster())
            except ResponseError as error:
                if not str(error).startswith(("LOADING", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "READONLY")):
                    raise
                fault: Exception = error
            except _AWAY as error:
                fault = error
                await self._forget()
            if time.monotonic() + pause >= end:
                raise Unavailable("The live store does not answer; try again.") from fault
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, 0.5)

    async def _forget(self) -> None:
        """Drop the client, so that the next use discovers the cluster anew."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            try:
                async with asyncio.timeout(0.2):
                    await cluster.aclose()
            except (*_AWAY, RedisError):
                pass

    def node(self, **options: Any) -> "redis.Redis":
        """A plain connection pool to the seed node; for subscriptions and blocking reads of one shard."""
        return redis.Redis(host=self.host, port=self.port, password=self.password or None, ssl=self.tls, **options)

    async def node_of(self, key: str) -> tuple[str, int]:
        """Address of the primary that has the key's slot."""

        async def find(cluster: RedisCluster) -> tuple[str, int]:
            node = cluster.get_node_from_key(key)
            if node is None:
                raise ConnectionError(f"no node has the slot of {key}")
            return str(node.host), int(node.port)

        return await self.call(find)

    async def close(self) -> None:
        """Close every connection."""
        await self._forget()


def connect(url: str, password: str = "") -> Valkey:
    """A client for `redis://` or `rediss://host:port`. Does not connect yet, so that Valkey may be away at start."""
    return Valkey(url, password)
