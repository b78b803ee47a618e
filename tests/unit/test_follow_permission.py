"""Who may follow a stream, and from which place."""

import pytest

from chat.errors import InvalidRequest, NotFound
from chat.model import GenerationStatus
from chat.usecases.follow_stream import FollowStream, parse_last_event_id
from tests.unit.streams import GEN, FakeStore, reply, saved_generation


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


def use_case(store: FakeStore) -> FollowStream:
    return FollowStream(store, store, store, store, store, store, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["x", "-1", "1.5", "٣", " 1", "9" * 13, "3\n"])
async def test_a_last_event_id_that_is_no_number_is_refused(store: FakeStore, given: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await use_case(store).permit("ada", GEN, given)
    assert refused.value.param == "lastEventId"


@pytest.mark.parametrize(("given", "place"), [(None, 0), ("", 0), ("0", 0), ("17", 17)])
def test_last_event_ids(given: str | None, place: int) -> None:
    assert parse_last_event_id(given) == place


async def test_a_place_past_the_end_is_refused_live_and_saved(store: FakeStore) -> None:
    for frame in reply(4):
        store.append(frame)
    assert (await use_case(store).permit("ada", GEN, "4")).after == 4
    with pytest.raises(InvalidRequest) as live:
        await use_case(store).permit("ada", GEN, "5")
    store.log, store.generation = None, saved_generation(last=4)
    assert (await use_case(store).permit("ada", GEN, "4")).after == 4
    with pytest.raises(InvalidRequest) as saved:
        await use_case(store).permit("ada", GEN, "5")
    assert live.value.param == saved.value.param == "lastEventId"


async def test_another_users_generation_is_as_absent_as_an_unknown_one(store: FakeStore) -> None:
    store.append(reply(3)[0])
    with pytest.raises(NotFound) as live:
        await use_case(store).permit("eve", GEN, None)
    with pytest.raises(NotFound) as unknown:
        await use_case(store).permit("eve", "gen_9", None)
    store.log, store.generation = None, saved_generation()
    with pytest.raises(NotFound) as saved:
        await use_case(store).permit("eve", GEN, None)
    store.generation = saved_generation(GenerationStatus.RUNNING)
    with pytest.raises(NotFound):
        await use_case(store).permit("eve", GEN, None)
    assert live.value.body() == unknown.value.body() == saved.value.body()
    assert store.recovered == []
