"""Drives a server through the official `anthropic` package and checks what comes back as its users would.

    python anthropic_client.py http://127.0.0.1:8080 [--api-key KEY]

Needs the packages `anthropic` and `jsonschema`. Works with any model, even one that talks nonsense: it checks what
the server owes, not what the model knows.
"""

import argparse

import anthropic
import jsonschema

ARGUMENTS = argparse.ArgumentParser()
ARGUMENTS.add_argument("url")
ARGUMENTS.add_argument("--api-key", default="none")
ARGUMENTS = ARGUMENTS.parse_args()

client = anthropic.Anthropic(base_url=ARGUMENTS.url, api_key=ARGUMENTS.api_key, max_retries=0, timeout=300)
MODEL = client.get("/v1/models", cast_to=object)["data"][0]["id"]
HELLO = [{"role": "user", "content": "Say hello, please."}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Bern", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


def ask(messages=HELLO, **more):
    request = {"model": MODEL, "messages": messages, "max_tokens": 16, "system": "Be brief.", **more}
    # The package has no field for it, the API has.
    request.setdefault("extra_body", {}).setdefault("temperature", 0)
    return client.messages.create(**request)


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def text():
    message = ask()
    assert message.type == "message" and message.role == "assistant" and message.model == MODEL
    assert text_of(message) and message.stop_reason in ("end_turn", "max_tokens")
    assert 1 <= message.usage.output_tokens <= 16
    assert text_of(ask()) == text_of(message), "without temperature an answer repeats"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say hello, please."}]}]
    assert text_of(ask(parts, system=[{"type": "text", "text": "Be brief."}])) == text_of(message)
    return message


def counting():
    message = ask()
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.").input_tokens
    assert counted == message.usage.input_tokens + message.usage.cache_read_input_tokens


def streaming():
    whole = text()
    events = list(ask(stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"], kinds
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds
    assert set(kinds[2:-3]) <= {"content_block_delta", "ping"}, kinds
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == text_of(whole)
    assert events[-2].delta.stop_reason == whole.stop_reason
    assert events[-2].usage.output_tokens == whole.usage.output_tokens
    with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=16, system="Be brief.", extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens


def stopping():
    said = text_of(ask(max_tokens=40))
    stop = said[len(said) // 2 :][:2]
    cut = ask(max_tokens=40, stop_sequences=["never said", stop])
    assert text_of(cut) == said[: said.index(stop)]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert ask(max_tokens=2).stop_reason == "max_tokens"


def tools():
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
        message = ask(tools=[WEATHER], tool_choice=choice, max_tokens=200)
        (call,) = message.content
        assert message.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "get_weather"
        jsonschema.validate(call.input, WEATHER["input_schema"])
    # The result of a call goes back to the model.
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    again = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert ask(again, tools=[WEATHER]).stop_reason in ("end_turn", "max_tokens", "tool_use")
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=200, tools=[WEATHER], tool_choice=choice) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (call,) = stream.get_final_message().content
    assert len(pieces) > 2, "arguments come in pieces"
    jsonschema.validate(call.input, WEATHER["input_schema"])


def forms():
    schema = {"type": "object", "properties": {"mood": {"enum": ["glad", "müde"]}}, "required": ["mood"], "additionalProperties": False}
    message = ask(max_tokens=100, output_config={"format": {"type": "json_schema", "schema": schema}})
    import json

    jsonschema.validate(json.loads(text_of(message)), schema)


def errors():
    def fails(kind, says, **wrong):
        try:
            ask(**wrong)
        except kind as error:
            assert error.body["type"] == "error" and says in error.body["error"]["message"], error.body
            return error.body["error"]["type"]
        raise AssertionError(f"{wrong} was accepted")

    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}]}]
    for says, wrong in [
        ("no_such_field", {"extra_body": {"no_such_field": 1}}),
        ("temperature", {"extra_body": {"temperature": -1}}),
        ("messages", {"messages": []}),
        ("messages[0].content[0]", {"messages": image}),
        ("limit", {"messages": [{"role": "user", "content": "word " * 200_000}]}),
    ]:
        assert fails(anthropic.BadRequestError, says, **wrong) == "invalid_request_error"
    assert fails(anthropic.NotFoundError, "no such model", model="no such model") == "not_found_error"


def cancelling():
    stream = ask(max_tokens=100_000, stream=True)
    for _, event in zip(range(3), stream):
        assert event.type in ("message_start", "content_block_start", "content_block_delta")
    stream.close()
    assert ask().content, "the next request is answered"


CHECKS = [text, counting, streaming, stopping, tools, forms, errors, cancelling]
for check in CHECKS:
    check()
    print(f"{check.__name__}: fine", flush=True)
print("all checks passed")
