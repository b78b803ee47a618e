"""The replica's own server, over a real socket: SageMaker's contract and the metrics."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from chat.adapters.engines.simulated import FIXED_REPLY, SimulatedEngine
from containers.common.process import serving
from containers.worker.http import WorkerHttp
from containers.worker.metrics import Metrics
from stacks.local.backends import free_port
from tests.integration.test_worker import eventually


class Replica:
    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine, self.is_ready = engine, True
        self.url = ""


@pytest_asyncio.fixture
async def replica() -> AsyncIterator[Replica]:
    engine, port = SimulatedEngine(100_000, 0.001, 0.0, 0.0), free_port()
    await engine.start()
    made = Replica(engine)
    http = WorkerHttp(engine, Metrics(engine), "sim", "large", lambda: made.is_ready)
    async with serving(http, "127.0.0.1", port):
        made.url = f"http://127.0.0.1:{port}"
        yield made
    await engine.stop()


@pytest_asyncio.fixture
async def client(replica: Replica) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=replica.url, timeout=10) as made:
        yield made


def call(content: str, **more: object) -> dict:
    return {"messages": [{"role": "user", "content": content}], **more}


async def test_ping_follows_the_health(replica: Replica, client: httpx.AsyncClient) -> None:
    assert (await client.get("/ping")).status_code == 200
    replica.is_ready = False
    assert (await client.get("/ping")).status_code == 503


async def test_an_invocation(client: httpx.AsyncClient) -> None:
    answer = await client.post("/invocations", json=call("Hi"))
    body = answer.json()
    assert (answer.status_code, body["text"], body["finishReason"]) == (200, FIXED_REPLY, "stop")
    assert body["usage"]["outputTokens"] == -(-len(FIXED_REPLY) // 3) and body["usage"]["inputTokens"] > 0


async def test_a_streamed_invocation(client: httpx.AsyncClient) -> None:
    content = '/sim {"text": "Việt 👋🏽 ", "tokens": 50, "rate": 5000}'
    answer = await client.post("/invocations", json=call(content, stream=True, max_tokens=30))
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    whole = "".join(event.get("text", "") for event in events)
    assert whole == ("Việt 👋🏽 " * 20).encode()[:90].decode(errors="ignore")
    assert events[-1]["finishReason"] == "length" and events[-1]["usage"]["outputTokens"] == 30


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_engine(client: httpx.AsyncClient, stream: bool) -> None:
    answer = await client.post("/invocations", json=call('/sim {"fail_at": 5}', stream=stream))
    if stream:
        assert '"engine_failed"' in answer.text and "[DONE]" not in answer.text
    else:
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_failed"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"messages": []}', b'{"messages": [{"role": "x", "content": "y"}]}',
             json.dumps(call("Hi", max_tokens=0)).encode(), json.dumps(call("Hi", temperature=-1)).encode()],
)  # fmt: skip
async def test_bad_bodies(client: httpx.AsyncClient, body: bytes) -> None:
    answer = await client.post("/invocations", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


async def test_unknown_routes(client: httpx.AsyncClient) -> None:
    assert (await client.get("/else")).status_code == 404
    assert (await client.get("/invocations")).status_code == 405
    assert (await client.post("/ping")).status_code == 405
    assert (await client.post("/invocations", content=b" " * 1_000_001)).status_code == 413


async def test_a_client_that_leaves_ends_its_generation(replica: Replica, client: httpx.AsyncClient) -> None:
    content = '/sim {"tokens": 5000, "rate": 50}'
    async with client.stream("POST", "/invocations", json=call(content, stream=True, max_tokens=5000)) as answer:
        await anext(answer.aiter_bytes())
        assert replica.engine.status().running == 1
    await eventually(lambda: replica.engine.status().running == 0)


async def test_metrics(client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    for name in ("worker_running", "worker_waiting", "worker_kv_used_fraction", "worker_kv_capacity_tokens"):
        assert f"\n{name} " in text
    assert "worker_kv_capacity_tokens 100000.0" in text
    assert "# TYPE worker_first_token_seconds histogram" in text
