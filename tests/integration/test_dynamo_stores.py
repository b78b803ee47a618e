"""The DynamoDB stores on the emulator, over both transports: races, ends, pages, sizes, deletion."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from chat import keys
from chat.adapters import dynamo
from chat.adapters.dynamo import Stores
from chat.errors import InvalidRequest, NotFound
from chat.ids import new_id, now_ms, rfc3339, utc_day
from chat.model import (
    Conversation,
    Cost,
    FinishReason,
    Generation,
    GenerationStatus,
    Message,
    MessageStatus,
    Outcome,
    Role,
    StoredMessage,
    Usage,
)
from chat.ports import Account, BeginStatus, NewTurn, Send
from chat.settings import StoreSettings
from stacks.local import backends
from tests.integration import tables

SAID = Outcome(FinishReason.STOP, "hi", Usage(5, 2), Cost(0.00001))


@pytest.fixture(scope="module", autouse=True)
def environment(ministack_port: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in backends.CREDENTIALS.items():
            patch.setenv(name, value)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{ministack_port}")
        yield


@pytest.fixture(scope="module")
def settings(environment: None, ministack_port: int) -> StoreSettings:
    return tables.create(f"http://127.0.0.1:{ministack_port}")


@pytest_asyncio.fixture(params=["http", "boto3"])
async def stores(settings: StoreSettings, environment: None, request: pytest.FixtureRequest) -> AsyncIterator[Stores]:
    if request.param == "boto3":
        yield dynamo.connect_blocking(settings)
        return
    async with dynamo.connect(settings) as made:
        yield made


@pytest.fixture
def user() -> str:
    return new_id("user")


async def conversation(stores: Stores, user: str, at: str | None = None) -> str:
    now = at or rfc3339(now_ms())
    made = Conversation(new_id("conv"), None, None, now, now, 0)
    await stores.conversations.create(user, made)
    return made.conversation_id


def turn(user: str, ident: str, last: int = 0, client_id: str | None = None, content: str = "hello") -> NewTurn:
    now, generation_id = rfc3339(now_ms()), new_id("gen")
    asked, answered = new_id("msg"), new_id("msg")
    said = Message(asked, ident, last + 1, Role.USER, content, MessageStatus.COMPLETED, None, None, None, now)
    reply = Message(
        answered, ident, last + 2, Role.ASSISTANT, "", MessageStatus.STREAMING, "big", asked, generation_id, now
    )
    client_id = client_id or new_id("send")
    generation = Generation(
        generation_id, user, ident, answered, last + 2, asked, "plus", "big", "large", GenerationStatus.QUEUED,
        now, 100, 50, 150, now_ms() + 300_000, client_id,
    )  # fmt: skip
    send = Send(client_id, "print", generation_id, last + 1, last + 2)
    return NewTurn(send, StoredMessage(said, 3), reply, generation, last, "A title")


async def end(stores: Stores, begun: NewTurn, outcome: Outcome = SAID) -> Generation:
    return await stores.generations.finish(begun.generation.generation_id, outcome, 3, now_ms())


async def test_a_turn_is_saved_whole_and_ended_once(stores: Stores, user: str, settings: StoreSettings) -> None:
    ident = await conversation(stores, user)
    begun = turn(user, ident)
    assert await stores.conversations.begin_turn(user, begun) is BeginStatus.CREATED
    opened = await stores.conversations.open(user, ident, 10)
    assert opened.active_generation_id == begun.generation.generation_id
    assert (opened.conversation.last_seq, opened.conversation.title) == (2, "A title")
    assert [stored.message for stored in opened.newest] == [begun.reply, begun.user.message]  # type: ignore[union-attr]
    assert await stores.generations.get(begun.generation.generation_id) == begun.generation
    assert await stores.conversations.find_send(ident, begun.send.client_message_id) == begun.send

    ends = [SAID, msgspec.structs.replace(SAID, text="other", usage=Usage(5, 9))]
    found = await asyncio.gather(*(end(stores, begun, ends[number % 2]) for number in range(6)))
    assert len({one.usage for one in found}) == 1
    saved = found[0]
    assert (saved.status, saved.last_event_id) == (GenerationStatus.COMPLETED, 3)
    opened = await stores.conversations.open(user, ident, 1)
    assert opened.active_generation_id is None
    reply = opened.newest[0]
    assert (reply.message.status, reply.message.usage, reply.tokens) == (
        MessageStatus.COMPLETED,
        saved.usage,
        saved.usage.output_tokens,
    )
    assert reply.message.content == ("hi" if saved.usage == SAID.usage else "other")

    day = await _item(settings.accounts_table, {"userId": user, "item": keys.day_item(utc_day(now_ms()))})
    assert (day["replies"], day["outputTokens"]) == ({"N": "1"}, {"N": str(saved.usage.output_tokens)})
    entry = keys.ledger_entry(utc_day(now_ms()), saved.generation_id)
    assert (await _item(settings.ledger_table, {"userId": user, "entry": entry}))["model"] == {"S": "big"}


async def _item(table: str, key: dict[str, str]) -> dict[str, Any]:
    import boto3

    found = boto3.client("dynamodb", region_name=backends.REGION).get_item(
        TableName=table, Key={name: {"S": value} for name, value in key.items()}
    )
    return dict(found["Item"])


async def test_identical_sends_at_once_are_one(stores: Stores, user: str) -> None:
    ident = await conversation(stores, user)
    copies = [turn(user, ident, client_id="same") for _ in range(8)]
    found = await asyncio.gather(*(stores.conversations.begin_turn(user, copy) for copy in copies))
    assert sorted(found) == sorted([BeginStatus.CREATED] + [BeginStatus.CLAIMED] * 7)
    winner = copies[found.index(BeginStatus.CREATED)]
    assert await stores.conversations.find_send(ident, "same") == winner.send
    assert len((await stores.conversations.open(user, ident, 10)).newest) == 2


async def test_why_a_turn_cannot_begin(stores: Stores, user: str) -> None:
    ident = await conversation(stores, user)
    begun = turn(user, ident)
    await stores.conversations.begin_turn(user, begun)
    begin = stores.conversations.begin_turn
    assert await begin(user, turn(user, ident, 2)) is BeginStatus.BUSY
    await end(stores, begun)
    assert await begin(user, turn(user, ident, 0)) is BeginStatus.MOVED
    assert await begin("somebody", turn("somebody", ident, 2)) is BeginStatus.GONE
    assert await begin(user, turn(user, new_id("conv"))) is BeginStatus.GONE
    assert await begin(user, turn(user, ident, 2)) is BeginStatus.CREATED


async def test_a_refused_send_gets_a_new_generation_once(stores: Stores, user: str, settings: StoreSettings) -> None:
    ident = await conversation(stores, user)
    begun = turn(user, ident)
    await stores.conversations.begin_turn(user, begun)
    await stores.generations.refuse(begun.generation.generation_id, now_ms())
    await stores.generations.refuse(begun.generation.generation_id, now_ms())
    opened = await stores.conversations.open(user, ident, 1)
    assert (opened.active_generation_id, opened.newest[0].message.status) == (None, MessageStatus.REFUSED)

    def retried() -> NewTurn:
        ident2 = new_id("gen")
        return NewTurn(
            msgspec.structs.replace(begun.send, generation_id=ident2),
            None,
            msgspec.structs.replace(begun.reply, generation_id=ident2),
            msgspec.structs.replace(begun.generation, generation_id=ident2),
            2,
            None,
        )

    found = await asyncio.gather(*(stores.conversations.retry_turn(user, begun.send, retried()) for _ in range(4)))
    assert sorted(found) == sorted([BeginStatus.CREATED] + [BeginStatus.CLAIMED] * 3)
    opened = await stores.conversations.open(user, ident, 2)
    assert opened.conversation.last_seq == 2
    assert opened.newest[0].message.generation_id == opened.active_generation_id
    # The refused one is over for good: a replica that ran it all the same changes nothing.
    assert (await end(stores, begun)).status is GenerationStatus.REFUSED
    assert (await stores.conversations.open(user, ident, 1)).newest[0].message.content == ""


async def test_only_what_holds_a_conversation_is_released(stores: Stores, user: str) -> None:
    ident = await conversation(stores, user)
    begun = turn(user, ident)
    await stores.conversations.begin_turn(user, begun)
    await stores.conversations.release(ident, "gen_other")
    assert (await stores.conversations.open(user, ident, 0)).active_generation_id is not None
    await stores.conversations.release(ident, begun.generation.generation_id)
    assert (await stores.conversations.open(user, ident, 0)).active_generation_id is None


async def test_pages_of_conversations_with_equal_times_are_complete(stores: Stores, user: str) -> None:
    at = rfc3339(now_ms())
    made = {await conversation(stores, user, at) for _ in range(7)}
    await conversation(stores, "somebody-else", at)
    found: list[str] = []
    cursor = None
    while True:
        page, cursor = await stores.conversations.page(user, cursor, 2)
        found += [one.conversation_id for one in page]
        assert page
        if cursor is None:
            break
    assert len(found) == 7
    assert set(found) == made


async def test_a_cursor_opens_only_the_callers_list(stores: Stores, user: str) -> None:
    for _ in range(3):
        await conversation(stores, user)
    _, cursor = await stores.conversations.page(user, None, 1)
    assert await stores.conversations.page("somebody", cursor, 10) == ([], None)


@pytest.mark.parametrize("cursor", ["\0", "eyJ9", "a" * 2000, "é", "bnVsbA", "W10", "eyJ1IjoieCIsImMiOiIifQ", "===="])
async def test_a_malformed_cursor_is_told(stores: Stores, user: str, cursor: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await stores.conversations.page(user, cursor, 10)
    assert caught.value.param == "cursor"


@pytest.mark.parametrize("large", ["question", "reply"])
async def test_contents_over_an_items_size_are_whole_and_removed(
    stores: Stores, user: str, settings: StoreSettings, large: str
) -> None:
    import boto3

    def kept() -> int:
        listed = boto3.client("s3", region_name=backends.REGION).list_objects_v2(
            Bucket=settings.content_bucket, Prefix=f"contents/{ident}/"
        )
        return int(listed["KeyCount"])

    ident, content = await conversation(stores, user), "👋" * 100_000
    begun = turn(user, ident, content=content if large == "question" else "x")
    await stores.conversations.begin_turn(user, begun)
    if large == "question":
        refused = turn(user, ident, 2, content=content)
        assert await stores.conversations.begin_turn(user, refused) is BeginStatus.BUSY
    await end(stores, begun, msgspec.structs.replace(SAID, text=content if large == "reply" else "y"))
    assert kept() == 1
    for messages in (
        (await stores.conversations.open(user, ident, 10)).newest,
        (await stores.conversations.messages(user, ident, None, 10))[0],
    ):
        assert messages[1 if large == "question" else 0].message.content == content
    await stores.conversations.delete(user, ident)
    assert await stores.conversations.purge(ident)
    assert kept() == 0


async def test_five_hundred_turns_page_without_a_hole(stores: Stores, user: str, settings: StoreSettings) -> None:
    ident = await conversation(stores, user)
    for number in range(500):
        begun = turn(user, ident, 2 * number, content=f"m{number}")
        assert await stores.conversations.begin_turn(user, begun) is BeginStatus.CREATED
        await stores.conversations.release(ident, begun.generation.generation_id)
    found: list[int] = []
    before: int | None = None
    while True:
        page, before = await stores.conversations.messages(user, ident, before, 100)
        found += [one.message.seq for one in page]
        if before is None:
            break
    assert found == list(range(1000, 0, -1))
    await stores.conversations.delete(user, ident)
    assert await stores.conversations.purge(ident)
    assert await stores.conversations.find_send(ident, begun.send.client_message_id) is None


async def test_a_generation_of_a_deleted_conversation_ends_and_brings_nothing_back(stores: Stores, user: str) -> None:
    for purge_first in (True, False):
        ident = await conversation(stores, user)
        begun = turn(user, ident)
        await stores.conversations.begin_turn(user, begun)
        assert await stores.conversations.delete(user, ident) == begun.generation.generation_id
        with pytest.raises(NotFound):
            await stores.conversations.open(user, ident, 1)
        assert await stores.conversations.begin_turn(user, turn(user, ident, 2)) is BeginStatus.GONE
        assert await stores.conversations.page(user, None, 10) == ([], None)
        if purge_first:
            assert await stores.conversations.purge(ident)
        assert (await end(stores, begun)).status is GenerationStatus.COMPLETED
        if not purge_first:
            assert await stores.conversations.delete(user, ident) is None  # again, by its owner
            assert await stores.conversations.purge(ident)
        with pytest.raises(NotFound):
            await stores.conversations.delete(user, ident)
        assert not await _rows(stores, ident)


async def _rows(stores: Stores, ident: str) -> list[Any]:
    return await stores.conversations._rows_to_purge(ident)


async def test_strangers_and_odd_ids_find_nothing(stores: Stores, user: str) -> None:
    ident = await conversation(stores, user)
    store = stores.conversations
    attempts: list[Callable[[str, str], Any]] = [
        lambda who, which: store.open(who, which, 1),
        lambda who, which: store.messages(who, which, None, 1),
        lambda who, which: store.messages(who, which, 5, 1),
        lambda who, which: store.rename(who, which, "mine"),
        store.delete,
    ]
    for attempt in attempts:
        for who, which in (("stranger", ident), (user, new_id("conv")), (user, "x" * 3000), (user, ""), (user, "é\0")):
            with pytest.raises(NotFound):
                await attempt(who, which)
    assert await stores.generations.get("x" * 3000) is None
    with pytest.raises(NotFound):
        await stores.generations.finish(new_id("gen"), SAID, 1, now_ms())


async def test_renaming_keeps_the_place_and_odd_characters(stores: Stores, user: str) -> None:
    ident = await conversation(stores, user)
    renamed = await stores.conversations.rename(user, ident, "e\u0301\0👩‍👩‍👧‍👦")
    assert renamed.title == "e\u0301\0👩‍👩‍👧‍👦"
    assert (await stores.conversations.open(user, ident, 0)).conversation == renamed


async def test_plans(stores: Stores, user: str) -> None:
    assert await stores.accounts.get(user) == Account(user, "free")
    await stores.accounts.set_plan(user, "plus")
    assert await stores.accounts.get(user) == Account(user, "plus")
