"""Drives a server through the official `openai` package and checks what comes back as its users would.

    python openai_client.py http://127.0.0.1:8080/v1 [--schemas 200] [--api-key KEY]

Needs the packages `openai` and `jsonschema`. Works with any model, even one that talks nonsense: it checks what
the server owes, not what the model knows.
"""

import argparse
import concurrent.futures
import json
import random

import jsonschema
import openai

ARGUMENTS = argparse.ArgumentParser()
ARGUMENTS.add_argument("url")
ARGUMENTS.add_argument("--api-key", default="none")
ARGUMENTS.add_argument("--schemas", type=int, default=200)
ARGUMENTS = ARGUMENTS.parse_args()

client = openai.OpenAI(base_url=ARGUMENTS.url, api_key=ARGUMENTS.api_key, max_retries=0, timeout=300)
MODEL = client.models.list().data[0].id
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello, please."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bern", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def ask(messages=HELLO, **more):
    return client.chat.completions.create(**{"model": MODEL, "messages": messages, "max_tokens": 16, "seed": 1, **more})


def models():
    model = client.models.retrieve(MODEL)
    assert model.id == MODEL and model.object == "model"


def chat():
    answer = ask()
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 1 <= answer.usage.completion_tokens <= 16
    assert ask().choices[0].message.content == choice.message.content, "a seed repeats"
    return choice.message.content


def streaming():
    whole = chat()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole, (text, whole)
    finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert finish[-1] in ("stop", "length") and not any(finish[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens <= 16
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens <= chunks[-1].usage.prompt_tokens
    with client.chat.completions.stream(model=MODEL, messages=HELLO, max_tokens=16, seed=1) as stream:
        for _ in stream:
            pass
        assert stream.current_completion_snapshot.choices[0].message.content == whole


def choices():
    answer = ask(n=3, temperature=1.5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1


def completions():
    answer = client.completions.create(model=MODEL, prompt=["Once upon", "In the"], max_tokens=8, temperature=0, logprobs=2)
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) <= 8
    streamed = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


def stopping():
    text = ask(max_tokens=40, temperature=0).choices[0].message.content
    stop = text[len(text) // 2 :][:2]
    cut = ask(max_tokens=40, temperature=0, stop=[stop]).choices[0]
    assert cut.message.content == text[: text.index(stop)] and cut.finish_reason == "stop"


def logprobs():
    choice = ask(logprobs=True, top_logprobs=4, temperature=0).choices[0]
    assert b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode(errors="replace") == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 4 and token.top_logprobs[0].token == token.token
        assert token.logprob <= 0 and abs(token.logprob - token.top_logprobs[0].logprob) < 1e-6


def tools():
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = ask(tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=200)
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    # The answer to a call goes back to the model.
    messages = [*HELLO, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert ask(messages, tools=[WEATHER]).choices[0].finish_reason in ("stop", "length", "tool_calls")
    chunks = list(ask(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=200, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].index == 0 and calls[0].id and calls[0].function.name == "get_weather"
    assert len(calls) > 3 and not any(call.id or call.function.name for call in calls[1:]), "arguments come in pieces"
    jsonschema.validate(json.loads("".join(call.function.arguments for call in calls)), WEATHER["function"]["parameters"])


def a_schema(draw, depth=0):
    """A random schema whose values come to an end."""
    kinds = ["enum", "integer", "boolean", "const", "string", "number"] + (["object", "array", "anyOf", "ref"] * 2 if depth < 3 else [])
    kind = draw.choice(kinds) if depth else "object"
    match kind:
        case "enum":
            return {"enum": draw.sample(["red", "grün", "青", "naïve “quoted”", 7, None, "a\\b"], 3)}
        case "integer":
            low = draw.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 200)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": draw.choice([1, 10.5])}
        case "boolean":
            return {"type": "boolean"}
        case "const":
            return {"const": draw.choice(["fixed", 3, True, "ß😀"])}
        case "string":
            return {"type": "string", "maxLength": draw.randint(1, 8)}
        case "array":
            return {"type": "array", "items": a_schema(draw, depth + 1), "minItems": draw.randint(0, 2), "maxItems": 3}
        case "anyOf":
            return {"anyOf": [a_schema(draw, depth + 1), {"type": "null"}]}
        case "ref":
            return {"$ref": "#/$defs/point"}
        case "object":
            names = draw.sample(["name", "größe", "x", "items", "日付", "a b"], draw.randint(1, 4))
            return {
                "type": "object",
                "properties": {name: a_schema(draw, depth + 1) for name in names},
                "required": names,
                "additionalProperties": False,
            }


def follows_a_schema(seed):
    schema = a_schema(random.Random(seed))
    schema["$defs"] = {"point": {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["x"], "additionalProperties": False}}
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    choice = ask(response_format=form, max_tokens=1000, seed=seed, temperature=0.8).choices[0]
    assert choice.finish_reason == "stop", (seed, schema, choice)
    jsonschema.validate(json.loads(choice.message.content), schema)


def schemas():
    if ARGUMENTS.schemas >= 100:
        text = json.dumps([a_schema(random.Random(seed)) for seed in range(ARGUMENTS.schemas)], ensure_ascii=False)
        for kind in ('"$ref"', '"enum"', '"number"', '"integer"', '"anyOf"', '"const"', '"maxItems"', '"maxLength"', "日付", "grün"):
            assert text.count(kind) >= 10, kind
    # Several at once, as a server has them.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(follows_a_schema, range(ARGUMENTS.schemas)))) == ARGUMENTS.schemas


def crowd():
    def say(i):
        messages = [*HELLO[:1], {"role": "user", "content": f"Number {i} says hello."}]
        return ask(messages, seed=i, temperature=0.7).choices[0].message.content

    alone = [say(i) for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(say, range(8))) == alone, "a crowd changes nothing"


def errors():
    for wrong, param in [
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
        ({"messages": []}, "messages"),
        ({"logit_bias": {"999999999": 1}}, None),
    ]:
        try:
            ask(**wrong)
            raise AssertionError(f"{wrong} was accepted")
        except openai.BadRequestError as error:
            assert param in (None, error.param) and error.type == "invalid_request_error", error.body
    try:
        ask([{"role": "user", "content": "word " * 200_000}])
        raise AssertionError("a prompt without end was accepted")
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded" and "limit" in error.message
    try:
        ask(model="no such model")
        raise AssertionError("a model that is not there was accepted")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"


def cancelling():
    stream = ask(max_tokens=100_000, stream=True, extra_body={"ignore_eos": True})
    for _, chunk in zip(range(3), stream):
        assert chunk.object == "chat.completion.chunk"
    stream.close()
    assert ask().choices, "the next request is answered"


CHECKS = [models, chat, streaming, choices, completions, stopping, logprobs, tools, schemas, crowd, errors, cancelling]
for check in CHECKS:
    check()
    print(f"{check.__name__}: fine", flush=True)
print("all checks passed")
