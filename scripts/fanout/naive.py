"""What the streamer would be without shared subscriptions: a blocking XREAD for each client on its own connection.

The same HTTP server, the same permission check and the same frames; for comparison only.
"""

import argparse
import asyncio
import re

import redis.asyncio

from chat import frames
from chat.adapters.oidc import OidcVerifier
from chat.adapters.valkey import ValkeyTokenBuffer, connect
from chat.keys import GenerationKeys
from containers.common.asgi import Json, Receive, Scope, Send, header
from containers.common.process import run, serving, stop_event

_STREAM = re.compile(r"/v1/generations/([^/]+)/stream")
BLOCK_MS = 8000


class NaiveHttp:
    """The ASGI application."""

    def __init__(self, valkey_url: str, verifier: OidcVerifier) -> None:
        self._url, self._verifier = valkey_url, verifier
        self._buffer = ValkeyTokenBuffer(connect(valkey_url))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = _STREAM.fullmatch(scope["path"])
        if match is None:
            await Json(send).answer(200, {"status": "ok"})
            return
        identity = await self._verifier.verify((header(scope, b"authorization") or "").partition(" ")[2])
        state = await self._buffer.live(match[1])
        if state is None or state.user_id != identity.user_id:
            await Json(send).answer(404, {})
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        work = asyncio.create_task(self._follow(GenerationKeys(match[1]).events, send))
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            work.cancel()

    async def _follow(self, key: str, send: Send) -> None:
        last = "0-0"
        async with redis.asyncio.Redis.from_url(self._url, single_connection_client=True) as client:
            while True:
                answer = await client.xread({key: last}, block=BLOCK_MS)
                streams = answer.items() if isinstance(answer, dict) else answer
                rows = [row for _, found in streams for row in _flat(found)]
                if not rows:
                    await send({"type": "http.response.body", "body": frames.KEEP_ALIVE, "more_body": True})
                    continue
                last = rows[-1][0].decode()
                body = b"".join(fields[b"f"] for _, fields in rows)
                await send({"type": "http.response.body", "body": body, "more_body": True})


def _flat(found: list) -> list:
    """Rows as (id, fields); the newer protocol nests them once more."""
    return found[0] if found and isinstance(found[0], list) else found


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--valkey", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--issuer", required=True)
    parser.add_argument("--audience", required=True)
    parser.add_argument("--jwks", required=True)
    options = parser.parse_args()
    stopping = stop_event()
    http = NaiveHttp(options.valkey, OidcVerifier(options.issuer, options.audience, options.jwks))
    async with serving(http, "127.0.0.1", options.port, timeout_graceful_shutdown=1):
        await stopping.wait()
    return 0


if __name__ == "__main__":
    run(main)
