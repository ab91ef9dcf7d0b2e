"""Uses the chat page in headless Chromium as a person would, with a mouse, a keyboard and a phone.

    python page.py http://127.0.0.1:8080 [--browser /usr/bin/chromium] [--screenshots DIR]

Needs the package `playwright` and a Chromium of the system's own; nothing else is downloaded. Works with any model
that says something; what a model has to say of its thoughts is put in its mouth.
"""

import argparse
import json
import pathlib
import re

from playwright.sync_api import expect, sync_playwright

ARGUMENTS = argparse.ArgumentParser()
ARGUMENTS.add_argument("url")
ARGUMENTS.add_argument("--browser", default="/usr/bin/chromium")
ARGUMENTS.add_argument("--screenshots", type=pathlib.Path)
ARGUMENTS = ARGUMENTS.parse_args()
ASK = "**/v1/chat/completions"
LONG = "Tell me a very long story about a lighthouse, a storm and a lost dog."
expect.set_options(timeout=60_000)


def sent(page, act):
    """The body of the request that `act` makes."""
    with page.expect_request(ASK) as request:
        act()
    return json.loads(request.value.post_data)


def idle(page):
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def picture(page, name):
    if ARGUMENTS.screenshots:
        page.screenshot(path=ARGUMENTS.screenshots / f"{name}.png")


def answer(page):
    return page.locator("article.assistant").last


def shows_the_model(page):
    expect(page.locator("#model")).not_to_have_text("tileinfer")
    assert page.evaluate("document.activeElement.id") == "prompt", "one can type at once"


def streams_and_says_how_fast(page):
    # Every change of the answer's text, as it is shown.
    page.evaluate(
        """() => { window.seen = []; new MutationObserver(() => {
            const text = document.querySelector('article.assistant:last-of-type .text')?.textContent ?? '';
            if (text && text !== window.seen.at(-1)) window.seen.push(text);
        }).observe(document.getElementById('log'), { subtree: true, childList: true, characterData: true }); }"""
    )
    page.get_by_label("Message").fill("What is the capital of France?")
    body = sent(page, page.get_by_role("button", name="Send").click)
    assert body["messages"] == [{"role": "user", "content": "What is the capital of France?"}], body
    assert body["stream"] and "temperature" not in body
    idle(page)
    seen = page.evaluate("window.seen")
    assert len(seen) > 3 and all(b.startswith(a) for a, b in zip(seen, seen[1:])), seen
    expect(answer(page).locator(".speed")).to_have_text(re.compile(r"\d+ tokens, \d+\.\d a second"))
    picture(page, "answer")


def remembers_and_forgets(page):
    page.get_by_label("Message").fill("And of Italy?")
    body = sent(page, lambda: page.keyboard.press("Enter"))
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"], body
    idle(page)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    page.get_by_label("Message").fill("Hello")
    body = sent(page, lambda: page.keyboard.press("Enter"))
    assert len(body["messages"]) == 1
    idle(page)


def has_settings(page):
    page.get_by_text("Settings").click()
    values = {"Temperature": "0.5", "Top p": "0.9", "Top k": "20", "Tokens at most": "6", "Seed": "7"}
    for label, value in values.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("System prompt").fill("Answer in one word.")
    picture(page, "settings")
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Message").fill("Name a colour.")
    body = sent(page, lambda: page.keyboard.press("Enter"))
    assert body["messages"][0] == {"role": "system", "content": "Answer in one word."}, body
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "max_tokens": 6, "seed": 7}
    assert {name: body[name] for name in wanted} == wanted, body
    idle(page)
    expect(answer(page).locator(".speed")).to_contain_text("6 tokens")
    for label in [*values, "System prompt"]:
        page.get_by_label(label).fill("")
    page.get_by_text("Settings").click()


def set_temperature(page, value):
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill(value)
    page.get_by_text("Settings").click()


def stops(page):
    # Greedily, and in a chat of its own, the answer is long: drawn, it may end before it is stopped.
    set_temperature(page, "0")
    for stop in (lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape")):
        page.get_by_role("button", name="New chat").click()
        page.get_by_label("Message").fill(LONG)
        page.keyboard.press("Enter")
        expect(answer(page).locator(".text")).not_to_be_empty()
        stop()
        idle(page)
        expect(answer(page).locator(".speed")).to_contain_text("stopped")
        said = answer(page).locator(".text").text_content()
        page.wait_for_timeout(300)
        assert answer(page).locator(".text").text_content() == said, "nothing comes after the stop"
    assert page.evaluate("document.activeElement.id") == "prompt", "one can go on typing"
    set_temperature(page, "")


def works_by_keyboard(page):
    message = page.get_by_label("Message")
    message.fill("")
    message.focus()
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two")
    assert message.input_value() == "One\nTwo"
    message.fill("   ")
    turns = page.locator("article").count()
    page.keyboard.press("Enter")
    assert page.locator("article").count() == turns, "nothing is not sent"
    # All that can be used can be reached, and shows that it is.
    page.get_by_role("button", name="New chat").focus()
    reached = set()
    for _ in range(12):
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        page.keyboard.press("Tab")
    assert {"clear", "SUMMARY", "prompt", "send"} <= reached, reached
    message.focus()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "the focus is shown"


def folds_thinking(page):
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "Let me "}, {"reasoning_content": "see."}, {"content": "Four."}]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ": ping\n\ndata: [DONE]\n\n"
    page.route(ASK, lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    page.get_by_label("Message").fill("Two and two?")
    page.keyboard.press("Enter")
    idle(page)
    thought = answer(page).locator("details.think .text")
    expect(answer(page).locator(".text").last).to_have_text("Four.")
    expect(thought).to_be_hidden()
    answer(page).get_by_text("Thinking").click()
    expect(thought).to_be_visible()
    expect(thought).to_have_text("Let me see.")
    page.unroute(ASK)


def shows_errors_and_no_markup(page):
    error = {"error": {"message": "the queue is full", "type": "rate_limit_error"}}
    page.route(ASK, lambda route: route.fulfill(status=429, json=error))
    page.get_by_label("Message").fill("<img src=x onerror='window.hacked = 1'>")
    page.keyboard.press("Enter")
    expect(answer(page)).to_contain_text("the queue is full")
    expect(page.locator("article.user").last).to_have_text("<img src=x onerror='window.hacked = 1'>")
    assert page.evaluate("window.hacked === undefined && document.images.length === 0")
    # What was not answered is not lost.
    expect(page.get_by_label("Message")).to_have_value("<img src=x onerror='window.hacked = 1'>")
    page.unroute(ASK)
    page.get_by_label("Message").fill("")
    # A gateway between may answer in HTML.
    page.route(ASK, lambda route: route.fulfill(status=502, content_type="text/html", body="<h1>Bad Gateway</h1>"))
    page.get_by_label("Message").fill("Hello")
    page.keyboard.press("Enter")
    expect(answer(page)).to_contain_text("502")
    page.unroute(ASK)
    page.get_by_label("Message").fill("")


def is_light_and_dark(page):
    shades = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        picture(page, scheme)
        script = """() => { const style = getComputedStyle(document.body);
            return [style.backgroundColor, style.color].map((colour) => colour.match(/[\\d.]+/g).slice(0, 3).reduce((a, b) => a + +b, 0)); }"""
        shades[scheme] = page.evaluate(script)
    (light_back, light_text), (dark_back, dark_text) = shades["light"], shades["dark"]
    assert light_back > 600 > 200 > light_text and dark_back < 200 < 600 < dark_text, shades


def fits_a_phone(page):
    page.set_viewport_size({"width": 360, "height": 640})
    page.get_by_label("Message").fill("x" * 300 + " " + "words and words " * 30)
    page.get_by_text("Settings").click()
    picture(page, "phone-settings")
    page.get_by_text("Settings").click()
    body = sent(page, page.get_by_role("button", name="Send").click)
    assert len(body["messages"][-1]["content"]) > 300
    page.keyboard.press("Escape")
    idle(page)
    picture(page, "phone")
    width, shown = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width <= shown, (width, shown)
    for name in ("New chat", "Send"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["y"] + box["height"] <= 640, (name, box)
        assert box["height"] >= 36, "large enough for a finger"


CHECKS = [
    shows_the_model,
    streams_and_says_how_fast,
    remembers_and_forgets,
    has_settings,
    stops,
    works_by_keyboard,
    folds_thinking,
    shows_errors_and_no_markup,
    is_light_and_dark,
    fits_a_phone,
]

with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=ARGUMENTS.browser, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1000, "height": 700})
    requests, wrongs = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: wrongs.append(str(error)))
    page.goto(ARGUMENTS.url)
    for check in CHECKS:
        check(page)
        print(f"{check.__name__}: fine", flush=True)
    assert all(url.startswith(ARGUMENTS.url) for url in requests), requests
    assert not wrongs, wrongs
    browser.close()
print("all checks passed")
