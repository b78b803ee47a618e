"""A streamer: `python -m containers.streamer.app`."""

import asyncio
import contextlib

from chat import tracing
from chat.adapters import dynamo
from chat.adapters.oidc import OidcVerifier
from chat.adapters.tokenizer import token_counter
from chat.adapters.valkey import ValkeyLanes, ValkeyTokenBuffer, ValkeyWakeups, connect
from chat.catalogue import Catalogue
from chat.settings import StreamerSettings
from chat.usecases.context import ContextBuilder
from chat.usecases.follow_stream import FollowStream
from chat.usecases.recover import Recover
from chat.usecases.regenerate import Regenerate
from chat.usecases.send_message import SendMessage
from chat.usecases.turns import Turns
from containers.common.process import run, serving, stop_event
from containers.streamer.http import StreamerHttp, UseCases
from containers.streamer.streams import OpenStreams

GRACE_SECONDS = 1
"""After a drain: how long the server waits for connections that are closing."""


async def main() -> int:
    """Serve until told to stop, then let the clients resume elsewhere."""
    settings = StreamerSettings.load()
    tracing.enable(settings.trace_stages)
    stopping = stop_event()
    valkey = connect(settings.valkey_url, settings.valkey_password)
    counter = token_counter(settings.tokenizer)
    async with dynamo.connect(settings) as stores:
        buffer, lanes = ValkeyTokenBuffer(valkey), ValkeyLanes(valkey, settings.plans)
        wakeups, streams = ValkeyWakeups(valkey), OpenStreams(lanes)
        catalogue = Catalogue(settings.models, settings.plans)
        turns = Turns(
            stores.conversations,
            stores.generations,
            stores.accounts,
            buffer,
            lanes,
            counter,
            catalogue,
            ContextBuilder(counter, settings.system_prompt, settings.context_budget_tokens),
            settings.temperature,
        )
        follow = FollowStream(
            buffer,
            wakeups,
            lanes,
            stores.generations,
            stores.conversations,
            Recover(turns),
            settings.heartbeat_seconds,
        )
        verifier = OidcVerifier(settings.oidc_issuer, settings.oidc_audience, settings.jwks_url)
        http = StreamerHttp(
            UseCases(SendMessage(turns), Regenerate(turns), follow, verifier),
            streams,
            settings.heartbeat_seconds,
            settings.max_connections,
        )
        marks = asyncio.create_task(streams.mark_for_ever())
        async with serving(http, settings.host, settings.port, timeout_graceful_shutdown=GRACE_SECONDS):
            await stopping.wait()
            await streams.drain(settings.drain_seconds)
        marks.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await marks
        await wakeups.close()
        await valkey.close()
    return 0


if __name__ == "__main__":
    run(main)
