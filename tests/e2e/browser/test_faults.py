"""The page against a service that misbehaves: drops, lost answers, refusals, other tabs."""

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.e2e.browser.fake_service import FakeService
from tests.e2e.browser.pages import ended, folded, growing, last_reply, replies, say, sign_in, text_of

pytestmark = pytest.mark.browser


def whole(page: Page, fake: FakeService) -> None:
    """The last reply is there once and whole, and so is every question."""
    ended(page)
    assert text_of(last_reply(page)) == folded(fake.reply)


def asked(fake: FakeService) -> list[str]:
    return [one["content"] for messages in fake.messages.values() for one in messages if one["role"] == "user"]


def test_drops_in_the_middle_of_frames_resume_after_the_last_whole_event(page: Page, fake: FakeService) -> None:
    sign_in(page, fake.origin, "ada")
    fake.faults.drop_after = [3, 0, 4, 1, 7]
    say(page, "hello")
    whole(page, fake)
    resumed = [after for method, _, after in fake.requests if method == "GET"]
    # How much of what was sent before a cut arrives is up to the sockets; nothing is asked for twice or skipped.
    assert len(resumed) == 5
    assert [int(one) for one in resumed] == sorted(int(one) for one in resumed)
    assert asked(fake) == ["hello"]


def test_a_lost_answer_is_asked_for_again_under_the_same_id(page: Page, fake: FakeService) -> None:
    sign_in(page, fake.origin, "ada")
    fake.faults.lose_send_answers = 2
    say(page, "hello")
    whole(page, fake)
    assert asked(fake) == ["hello"]
    expect(page.locator(".message")).to_have_count(2)


def test_a_reload_before_the_answer_sends_again_under_the_same_id(page: Page, fake: FakeService) -> None:
    sign_in(page, fake.origin, "ada")
    fake.faults.lose_send_answers = 1000
    say(page, "hello")
    expect(page.get_by_text("The service does not answer. Trying again …")).to_be_visible()
    page.reload()
    fake.faults.lose_send_answers = 0
    whole(page, fake)
    assert asked(fake) == ["hello"]
    expect(page.locator(".message")).to_have_count(2)


def test_reload_in_the_middle_follows_from_the_start(page: Page, fake: FakeService) -> None:
    fake.faults.pause = 0.05
    sign_in(page, fake.origin, "ada")
    say(page, "hello")
    growing(page, 40)
    page.reload()
    growing(page, 40)
    whole(page, fake)
    expect(page.locator(".message")).to_have_count(2)


def test_a_refusal_counts_down_and_the_same_send_is_tried_again(page: Page, fake: FakeService) -> None:
    sign_in(page, fake.origin, "ada")
    fake.faults.refuse_sends = [(429, "minute_quota_exceeded", 2)]
    say(page, "hello")
    again = page.get_by_role("button", name="Try again")
    expect(again).to_be_disabled()
    expect(again).to_have_text("Try again in 2 s")
    expect(page.get_by_text("Refused on purpose: minute_quota_exceeded.", exact=True).first).to_be_visible()
    again.click()  # waits until it is enabled
    whole(page, fake)
    assert asked(fake) == ["hello"]


def test_a_refusal_outlives_a_reload(page: Page, fake: FakeService) -> None:
    sign_in(page, fake.origin, "ada")
    fake.faults.refuse_sends = [(429, "overloaded", 1)]
    say(page, "hello")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    page.reload()
    page.get_by_role("button", name="Try again").click()
    whole(page, fake)
    assert asked(fake) == ["hello"]


def test_a_service_that_is_away_is_tried_again_by_itself(page: Page, fake: FakeService) -> None:
    sign_in(page, fake.origin, "ada")
    fake.faults.refuse_sends = [(503, "unavailable", 1)] * 2
    say(page, "hello")
    whole(page, fake)
    fake.faults.away = 3
    page.reload()
    whole(page, fake)


def test_what_cannot_succeed_goes_back_into_the_box(page: Page, fake: FakeService) -> None:
    sign_in(page, fake.origin, "ada")
    fake.faults.refuse_sends = [(400, "context_length_exceeded", 0)]
    say(page, "far too long")
    expect(page.locator("#notice")).to_contain_text("context_length_exceeded")
    expect(page.get_by_label("Message", exact=True)).to_have_value("far too long")
    expect(page.locator(".message")).to_have_count(0)


def test_a_broken_reply_is_marked_and_can_be_had_again_beside_the_old_one(page: Page, fake: FakeService) -> None:
    sign_in(page, fake.origin, "ada")
    fake.faults.fail_at = 5
    say(page, "hello")
    ended(page, "FAILED")
    expect(last_reply(page)).to_contain_text("The reply broke off")
    page.get_by_role("button", name="Regenerate").click()
    whole(page, fake)
    expect(replies(page)).to_have_count(1)
    expect(last_reply(page)).to_contain_text("reply 2/2")
    page.get_by_role("button", name="Earlier reply").click()
    expect(last_reply(page)).to_contain_text("reply 1/2")
    expect(last_reply(page)).to_have_attribute("data-status", "FAILED")
    say(page, "and on")
    expect(replies(page)).to_have_count(2)
    whole(page, fake)


def test_an_old_turn_regenerated_stays_in_its_place(page: Page, fake: FakeService) -> None:
    sign_in(page, fake.origin, "ada")
    for question in ("first", "second"):
        say(page, question)
        ended(page)
    fake.reply = "A quite other answer. "
    page.get_by_role("button", name="Regenerate").first.click()
    expect(replies(page).first).to_contain_text("reply 2/2")
    expect(replies(page).first).to_have_attribute("data-status", "COMPLETED")
    assert text_of(replies(page).first) == "A quite other answer."
    contents = page.locator(".message.user").all_inner_texts()
    assert [one.split("\n")[-1] for one in contents] == ["first", "second"]


def test_place_in_the_queue_model_and_smaller_model_are_shown(page: Page, fake: FakeService) -> None:
    sign_in(page, fake.origin, "ada")
    fake.faults.queued = 3
    say(page, "hello")
    expect(last_reply(page)).to_contain_text("place 3 · about 12 s")
    fake.faults.queued = 1
    expect(last_reply(page)).to_contain_text("place 1 · about 4 s")
    fake.faults.queued = 0
    whole(page, fake)
    expect(last_reply(page)).to_contain_text("fake-1")
    expect(last_reply(page)).to_contain_text("smaller model")


def test_stop_keeps_what_was_written_also_when_asked_for_before_the_answer(page: Page, fake: FakeService) -> None:
    sign_in(page, fake.origin, "ada")
    fake.faults.pause = 0.1
    say(page, "hello")
    growing(page, 10)
    page.get_by_role("button", name="Stop").click()
    ended(page, "CANCELLED")
    expect(last_reply(page)).to_contain_text("Stopped")
    fake.faults.lose_send_answers = 2
    say(page, "again")
    page.get_by_role("button", name="Stop").click()
    expect(replies(page)).to_have_count(2)
    ended(page, "CANCELLED")
    assert asked(fake) == ["hello", "again"]


def test_stop_in_the_queue(page: Page, fake: FakeService) -> None:
    sign_in(page, fake.origin, "ada")
    fake.faults.queued = 2
    say(page, "hello")
    expect(last_reply(page)).to_contain_text("place 2")
    page.get_by_role("button", name="Stop").click()
    ended(page, "CANCELLED")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".message")).to_have_count(2)
    fake.faults.queued = 0
    say(page, "and now")
    whole(page, fake)
    expect(page.locator(".message")).to_have_count(4)


def test_a_busy_conversation_is_followed_and_the_text_given_back(
    page: Page, context: BrowserContext, fake: FakeService
) -> None:
    sign_in(page, fake.origin, "ada")
    say(page, "zero")
    ended(page)
    # A tab that hears nothing of the others: no broadcasts, no focus.
    page.evaluate("BroadcastChannel.prototype.postMessage = () => {}")
    other = context.new_page()
    other.add_init_script("window.BroadcastChannel = class { postMessage() {} }")
    other.goto(page.url)
    expect(replies(other)).to_have_count(1)
    fake.faults.pause = 0.1
    say(page, "one")
    growing(page, 5)
    say(other, "two")
    expect(other.get_by_label("Message", exact=True)).to_have_value("two")
    growing(other, 20)
    for tab in (page, other):
        whole(tab, fake)
        expect(tab.locator(".message")).to_have_count(4)
    assert asked(fake) == ["zero", "one"]


def test_two_tabs_show_the_same(page: Page, context: BrowserContext, fake: FakeService) -> None:
    fake.faults.pause = 0.05
    sign_in(page, fake.origin, "ada")
    say(page, "hello")
    growing(page, 20)
    other = context.new_page()
    other.goto(page.url)
    growing(other, 20)
    for tab in (page, other):
        whole(tab, fake)
    say(other, "and the next turn")
    growing(page, 20)
    for tab in (page, other):
        expect(replies(tab)).to_have_count(2)
        whole(tab, fake)
    other.get_by_role("button", name="Delete").click()
    other.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator(".message")).to_have_count(0)


def test_offline_for_a_while(page: Page, context: BrowserContext, fake: FakeService) -> None:
    sign_in(page, fake.origin, "ada")
    fake.faults.pause = 0.05
    say(page, "hello")
    growing(page, 20)
    context.set_offline(True)
    fake.cut()
    expect(last_reply(page)).to_contain_text("You are offline.")
    context.set_offline(False)
    whole(page, fake)
    assert asked(fake) == ["hello"]


def test_an_expired_session_leads_to_signing_in(page: Page, fake: FakeService) -> None:
    page.goto(fake.origin)
    page.evaluate("""localStorage.setItem('session', '{"token":"expired","user":"ada","plan":"free"}')""")
    page.reload()
    expect(page.get_by_text("Your session has ended. Sign in again.")).to_be_visible()
    expect(page.get_by_label("Name")).to_be_focused()
