"""Stopping in every state, with the stores as small fakes."""

from dataclasses import dataclass, field

import pytest

from chat.errors import NotFound
from chat.model import FinishReason, Generation, GenerationStatus
from chat.ports import JobState
from chat.usecases.cancel import CancelGeneration


def a_generation(status: GenerationStatus = GenerationStatus.QUEUED) -> Generation:
    return Generation(
        generation_id="gen_1",
        user_id="ada",
        conversation_id="conv_1",
        message_id="msg_2",
        reply_seq=2,
        parent_id="msg_1",
        plan="plus",
        model="m",
        pool="large",
        status=status,
        created_at="2026-01-01T00:00:00.000Z",
        max_tokens=10,
        prompt_tokens=5,
        hold_tokens=15,
        expires_at=0,
        client_message_id="a",
    )


@dataclass
class World:
    """Remembers what was done, in order."""

    generation: Generation | None
    state: JobState = JobState.QUEUED
    done: list[object] = field(default_factory=list)

    async def get(self, generation_id: str) -> Generation | None:
        return self.generation

    async def request_cancel(self, generation_id: str) -> None:
        self.done.append("mark")

    async def cancel(self, pool: str, generation_id: str) -> JobState:
        self.done.append("lane")
        return self.state

    async def release(self, pool: str, generation_id: str) -> None:
        self.done.append("release")

    async def finish(self, generation_id: str, pool: str, **how: object) -> Generation:
        self.done.append(("finish", how["reason"], how["attempt"]))
        return a_generation(GenerationStatus.CANCELLED)

    def use_case(self) -> CancelGeneration:
        return CancelGeneration(self, self, self, self.finish)  # type: ignore[arg-type]


async def test_a_queued_one_is_finished_by_the_canceller_itself() -> None:
    world = World(a_generation())
    cancelled = await world.use_case()("ada", "gen_1")
    assert world.done == ["mark", "lane", ("finish", FinishReason.CANCELLED, None)]
    assert (cancelled.status, cancelled.ended) == (GenerationStatus.CANCELLED, False)


async def test_a_running_one_is_left_to_its_replica() -> None:
    world = World(a_generation(), JobState.DISPATCHED)
    cancelled = await world.use_case()("ada", "gen_1")
    assert world.done == ["mark", "lane"]
    assert (cancelled.status, cancelled.ended) == (GenerationStatus.RUNNING, False)


async def test_one_that_no_pool_knows_is_finished_too() -> None:
    world = World(a_generation(), JobState.UNKNOWN)
    await world.use_case()("ada", "gen_1")
    assert ("finish", FinishReason.CANCELLED, None) in world.done


async def test_an_ended_one_stays_as_it_is() -> None:
    world = World(a_generation(GenerationStatus.COMPLETED))
    cancelled = await world.use_case()("ada", "gen_1")
    assert (cancelled.status, cancelled.ended) == (GenerationStatus.COMPLETED, True)
    assert world.done == ["release"]


@pytest.mark.parametrize("generation", [None, a_generation()])
async def test_unknown_and_foreign_ones_look_the_same(generation: Generation | None) -> None:
    world = World(generation)
    with pytest.raises(NotFound):
        await world.use_case()("eve", "gen_1")
    assert world.done == []
