"""The page in a real browser against the real service with the simulated engine."""

import os
import signal
import uuid

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.e2e.browser.pages import (
    ended,
    folded,
    growing,
    last_reply,
    replies,
    say,
    sign_in,
    sim,
    text_of,
)
from tests.e2e.client import Service, wait_for

pytestmark = pytest.mark.browser

TEXT = "Việt Nam, crème brûlée 🍮 and 👩🏽‍🚀 go on; "


def saved(page: Page) -> list[dict]:
    """The conversation's newest messages by the API, oldest first."""
    return page.evaluate(
        """async () => {
          const { token } = JSON.parse(localStorage.getItem('session'));
          const url = `/v1/conversations/${location.hash.slice(1)}/messages?limit=100`;
          const response = await fetch(url, { headers: { Authorization: `Bearer ${token}` } });
          return (await response.json()).data.reverse();
        }"""
    )


def equals_history(page: Page) -> None:
    """What is shown is what is saved."""
    last = saved(page)[-1]
    assert text_of(last_reply(page)) == folded(last["content"])
    assert last["status"] == last_reply(page).get_attribute("data-status")


@pytest.fixture
def user(page: Page, service: Service) -> Page:
    """A new user's page."""
    sign_in(page, service.base_url, f"p{uuid.uuid4().hex[:10]}", "plus")
    return page


def test_send_watch_it_grow_reload_in_the_middle(user: Page) -> None:
    say(user, sim(text=TEXT, tokens=240, rate=40))
    first = growing(user)
    growing(user, first)
    user.reload()
    again = growing(user, first)
    growing(user, again)
    ended(user)
    equals_history(user)
    assert text_of(last_reply(user)).startswith(folded(TEXT * 3))
    expect(user.locator(".message")).to_have_count(2)


def test_stop_keeps_question_and_text(user: Page) -> None:
    say(user, sim(text=TEXT, tokens=2000, rate=40))
    growing(user, 30)
    user.get_by_role("button", name="Stop").click()
    ended(user, "CANCELLED")
    equals_history(user)
    assert len(text_of(last_reply(user))) >= 30
    user.reload()
    ended(user, "CANCELLED")
    expect(user.locator(".message")).to_have_count(2)


def test_regenerate_keeps_both_and_the_next_turn_follows(user: Page) -> None:
    say(user, "hello")
    ended(user)
    user.get_by_role("button", name="Regenerate").click()
    expect(last_reply(user)).to_contain_text("reply 2/2")
    ended(user)
    user.get_by_role("button", name="Earlier reply").click()
    expect(last_reply(user)).to_contain_text("reply 1/2")
    say(user, sim(text="The second turn. ", tokens=20))
    expect(replies(user)).to_have_count(2)
    ended(user)
    equals_history(user)
    assert [one["role"] for one in saved(user)] == ["user", "assistant", "assistant", "user", "assistant"]


def test_two_tabs(user: Page, context: BrowserContext) -> None:
    say(user, sim(text=TEXT, tokens=300, rate=40))
    growing(user, 20)
    other = context.new_page()
    other.goto(user.url)
    growing(other, 20)
    for tab in (user, other):
        ended(tab)
        equals_history(tab)
    say(other, sim(text="From the other tab. ", tokens=60, rate=30))
    growing(user, 5)
    for tab in (user, other):
        expect(replies(tab)).to_have_count(2)
        ended(tab)
        equals_history(tab)


def test_rename_delete_and_the_list(user: Page) -> None:
    say(user, "hello")
    ended(user)
    user.get_by_role("button", name="Rename").click()
    user.get_by_label("Title").fill("Another name")
    user.keyboard.press("Enter")
    expect(user.get_by_role("heading", name="Another name")).to_be_visible()
    expect(user.locator(".conversation")).to_have_text(["Another name"])
    user.get_by_role("button", name="New chat").click()
    expect(user.locator(".message")).to_have_count(0)
    user.get_by_role("button", name="Another name").click()
    expect(user.locator(".message")).to_have_count(2)
    user.get_by_role("button", name="Delete").click()
    user.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(user.locator(".conversation")).to_have_count(0)
    expect(user.locator(".message")).to_have_count(0)


def test_history_is_paged_as_one_scrolls(user: Page) -> None:
    for number in range(17):
        say(user, sim(text=f"answer {number:02d} ", tokens=4))
        expect(replies(user)).to_have_count(number + 1)
        ended(user)
    user.reload()
    expect(replies(user)).to_have_count(15)
    user.locator("#scroll").focus()
    user.keyboard.press("Home")
    expect(replies(user)).to_have_count(17)
    expect(replies(user).first).to_contain_text("answer 00")
    expect(user.get_by_role("button", name="Load earlier messages")).to_be_hidden()


def test_a_killed_streamer_is_survived(user: Page, service: Service) -> None:
    say(user, sim(text=TEXT, tokens=400, rate=40))
    growing(user, 40)
    wait_for((service.local_dir / "run" / "streamer-1.pid").exists, 10, "a second streamer")
    for name in ("streamer-0", "streamer-1"):
        os.kill(service.pid(name), signal.SIGKILL)
    ended(user)
    equals_history(user)
    expect(user.locator(".message")).to_have_count(2)
