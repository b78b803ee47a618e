"""The page's modules by themselves, inside a real browser."""

import json

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.browser.fake_service import FakeService
from tests.e2e.browser.pages import ended, last_reply, say, sign_in

pytestmark = pytest.mark.browser

STREAM = (
    "retry: 1500\n\n: keep-alive\n\n"
    'event: queued\ndata: {"position":1}\n\n'
    'id: 1\r\nevent: started\r\ndata: {"model":"m"}\r\n\r\n'
    'id: 2\nevent: delta\ndata: {"text":"a 👩🏽‍🚀 b"}\n\n'
    ":\n"
    'id: 3\revent: delta\rdata: {"text":\rdata: "Việt e\u0301\u0302 🍮"}\r\r'
    'id:4\nevent:delta\ndata:{"text":"no space"}\nunknown: field\nid\n\n'
    'id: 5\nevent: done\ndata: {"status":"COMPLETED"}\n\n'
    'id: 6\nevent: delta\ndata: {"text":"never ended"}\n'
)
EVENTS = [
    {"id": None, "kind": "queued", "data": {"position": 1}},
    {"id": 1, "kind": "started", "data": {"model": "m"}},
    {"id": 2, "kind": "delta", "data": {"text": "a 👩🏽‍🚀 b"}},
    {"id": 3, "kind": "delta", "data": {"text": "Việt e\u0301\u0302 🍮"}},
    {"id": 4, "kind": "delta", "data": {"text": "no space"}},
    {"id": 5, "kind": "done", "data": {"status": "COMPLETED"}},
]


def test_parser_at_every_pair_of_byte_borders(page: Page, fake: FakeService) -> None:
    page.goto(fake.origin)
    found = page.evaluate(
        """async stream => {
          const { EventParser } = await import('/js/sse.js');
          const bytes = new TextEncoder().encode(stream);
          const parse = cuts => {
            const parser = new EventParser();
            const events = [];
            let from = 0;
            for (const cut of [...cuts, bytes.length]) {
              events.push(...parser.feed(bytes.subarray(from, cut)));
              from = cut;
            }
            return JSON.stringify([parser.retry, events]);
          };
          const every = [...bytes.keys()];
          const results = new Set([parse([]), parse(every)]);
          for (const one of every) results.add(parse([one]));
          for (const one of every) for (let two = one; two < bytes.length; two += 3) results.add(parse([one, two]));
          return [...results];
        }""",
        STREAM,
    )
    assert [json.loads(one) for one in found] == [[1500, EVENTS]]


def test_a_silent_connection_counts_as_broken(page: Page, fake: FakeService) -> None:
    page.goto(fake.origin)
    error = page.evaluate(
        """async () => {
          const { eventsOf } = await import('/js/sse.js');
          const body = new ReadableStream({ start() {} });
          try { for await (const event of eventsOf({ body }, { silenceMs: 50 })); } catch (error) { return error.name; }
        }"""
    )
    assert error == "TypeError"


def rendered(page: Page, text: str) -> str:
    return page.evaluate(
        """async text => {
          const { render } = await import('/js/markdown.js');
          const holder = document.createElement('div');
          holder.append(render(text));
          return holder.innerHTML;
        }""",
        text,
    )


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("**bold** and `**code**` and *soft*", "<strong>bold</strong> and <code>**code**</code> and <em>soft</em>"),
        ("2 * 3 * 4 and **open", "<p>2 * 3 * 4 and **open</p>"),
        ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("3. a\n\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("```js\na < b\n\n- c\n```\nend", "<code>a &lt; b\n\n- c</code></pre><p>end</p>"),
        ("```\nopen", "<code>open</code></pre>"),
        ("## Title\ntext", '<p class="heading">Title</p><p>text</p>'),
        ("```", "<code></code>"),
    ],
)
def test_markdown(page: Page, fake: FakeService, text: str, html: str) -> None:
    page.goto(fake.origin)
    assert html in rendered(page, text)


def test_nothing_in_a_message_becomes_markup(page: Page, fake: FakeService) -> None:
    attack = (
        '<img src=x onerror="window.hit=1"><script>window.hit=1</script> [a](javascript:window.hit=1) '
        "`<b>`\n- <svg onload=window.hit=1>\n```\"><iframe srcdoc='<script>parent.hit=1</script>'>\n</code></pre><b>x\n"
    )
    fake.reply = attack
    sign_in(page, fake.origin, "ada")
    say(page, attack)
    ended(page)
    names = page.evaluate(
        "[...new Set([...document.querySelectorAll('#messages *')].map(one => one.localName))].sort()"
    )
    allowed = {"li", "h3", "div", "p", "br", "code", "pre", "ul", "ol", "span", "button", "strong", "em"}
    assert set(names) <= allowed
    assert page.evaluate("window.hit === undefined")
    expect(last_reply(page)).to_contain_text('<img src=x onerror="window.hit=1">')
