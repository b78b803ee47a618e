"""A connected Valkey client for each test."""

from collections.abc import AsyncIterator

import pytest_asyncio

from chat.adapters.valkey import Valkey, connect


@pytest_asyncio.fixture
async def valkey(valkey_port: int) -> AsyncIterator[Valkey]:
    client = connect(f"redis://127.0.0.1:{valkey_port}")
    yield client
    await client.close()
