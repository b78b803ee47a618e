"""What the tests do with the page and read from it."""

import json
import re

from playwright.sync_api import Locator, Page, expect


def sign_in(page: Page, origin: str, user: str, plan: str = "free") -> None:
    """Open the page and sign in."""
    page.goto(origin)
    page.get_by_label("Name").fill(user)
    page.get_by_label("Plus" if plan == "plus" else "Free").check()
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def say(page: Page, text: str) -> None:
    """Type and press Enter."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def sim(**options: object) -> str:
    """A message that tells the simulated engine what to do."""
    return "/sim " + json.dumps(options, ensure_ascii=False)


def replies(page: Page) -> Locator:
    return page.locator(".message.assistant")


def last_reply(page: Page) -> Locator:
    return replies(page).last


def ended(page: Page, status: str = "COMPLETED", timeout: float = 30_000) -> None:
    """Wait until the last reply has this status."""
    expect(last_reply(page)).to_have_attribute("data-status", status, timeout=timeout)


def text_of(reply: Locator) -> str:
    """A reply's text with its white space evened out, as rendering folds it."""
    return folded(reply.locator(".body").inner_text())


def folded(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("**", "")).strip()


def growing(page: Page, beyond: int = 0) -> int:
    """Wait until the streaming reply is longer than this; gives its length."""
    page.wait_for_function(
        """beyond => {
          const node = [...document.querySelectorAll('.message.assistant.streaming .body')].at(-1);
          return node && node.textContent.length > beyond;
        }""",
        arg=beyond,
    )
    return len(last_reply(page).locator(".body").text_content() or "")
