"""How fast a server is: tokens a second, time to the first token and between two, for so many streams at once.

    python load.py http://127.0.0.1:8080 --streams 1 8 --prompt-words 100 --tokens 128 --rounds 3

Speaks to anything with OpenAI's `/v1/completions`; needs Python alone. Rounds of all numbers of streams take turns, so
that a busy machine is busy for each; medians are told. Prompts differ from their first word on, so no cache helps.
"""

import argparse
import http.client
import json
import random
import statistics
import threading
import time
import urllib.parse

ARGUMENTS = argparse.ArgumentParser()
ARGUMENTS.add_argument("url")
ARGUMENTS.add_argument("--model", help="its name, where the server wants one")
ARGUMENTS.add_argument("--streams", type=int, nargs="+", default=[1, 8])
ARGUMENTS.add_argument("--prompt-words", type=int, default=100)
ARGUMENTS.add_argument("--tokens", type=int, default=128)
ARGUMENTS.add_argument("--rounds", type=int, default=3)
ARGUMENTS.add_argument("--seed", type=int, default=0, help="other prompts than with another seed")
ARGUMENTS = ARGUMENTS.parse_args()
URL = urllib.parse.urlsplit(ARGUMENTS.url)
WORDS = "time year people way day man thing woman life child world school state family student group country".split()


def one(seed, times):
    """Adds the moments at which the chunks of one stream came."""
    draw = random.Random(seed)
    prompt = f"{seed}: " + " ".join(draw.choice(WORDS) for _ in range(ARGUMENTS.prompt_words))
    body = {"prompt": prompt, "max_tokens": ARGUMENTS.tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    if ARGUMENTS.model:
        body["model"] = ARGUMENTS.model
    connection = http.client.HTTPConnection(URL.hostname, URL.port, timeout=600)
    moments = [time.perf_counter()]
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {"):
            moments.append(time.perf_counter())
    connection.close()
    times.append(moments)


def measure(streams, seed):
    times = []
    threads = [threading.Thread(target=one, args=(seed * 1000 + i, times)) for i in range(streams)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - start
    assert len(times) == streams, "a stream failed"
    gaps = [b - a for moments in times for a, b in zip(moments[1:], moments[2:])]
    return {
        "tokens_per_second": streams * ARGUMENTS.tokens / wall,
        "first_token_ms": 1000 * statistics.median(moments[1] - moments[0] for moments in times),
        "between_ms": 1000 * statistics.median(gaps),
        "between_p99_ms": 1000 * statistics.quantiles(gaps, n=100)[98],
    }


FIRST = 1000 * ARGUMENTS.seed
measure(1, FIRST + 999)
results = {streams: [] for streams in ARGUMENTS.streams}
for turn in range(ARGUMENTS.rounds):
    for streams in ARGUMENTS.streams:
        results[streams].append(measure(streams, FIRST + turn * 100 + streams))
for streams, rounds in results.items():
    medians = {name: round(statistics.median(result[name] for result in rounds), 1) for name in rounds[0]}
    print(json.dumps({"streams": streams, **medians}), flush=True)
