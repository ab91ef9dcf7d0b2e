"""Two replicas behind a gateway, one of them killed under load: every answer is right or visibly none.

    python test_replicas.py TILEINFER MODEL --gateway nginx|sglang-router [--answers 12]

TILEINFER is the command, MODEL a directory. Needs nginx, or the package `sglang-router`. All runs on loopback.

Each request has a text of its own whose answer, without temperature, is always the same. It is asked for once at
the start, of one replica. From then on any other answer is a wrong one: an answer of somebody else, a part that
passes for the whole, a mixture of two.
"""

import argparse
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ARGUMENTS = argparse.ArgumentParser()
ARGUMENTS.add_argument("tileinfer")
ARGUMENTS.add_argument("model")
ARGUMENTS.add_argument("--gateway", choices=["nginx", "sglang-router"], default="nginx")
ARGUMENTS.add_argument("--answers", type=int, default=12, help="how many before one replica dies, while it is away, and after")
ARGUMENTS = ARGUMENTS.parse_args()
HERE = pathlib.Path(__file__).parent
CLIENTS = 6


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def call(port, method, path, body=None, timeout=120):
    """Status and text of an answer that came whole."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def is_healthy(port):
    try:
        return call(port, "GET", "/health", timeout=20)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def wait_until(what, says, seconds=300):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, says
        time.sleep(0.1)


def replica(port):
    command = [ARGUMENTS.tileinfer, "serve", ARGUMENTS.model, "--address", f"127.0.0.1:{port}"]
    return subprocess.Popen([*command, "--threads", "1", "--served-name", "model", "--quiet"])


def gateway(port, replicas, folder):
    if ARGUMENTS.gateway == "sglang-router":
        workers = [f"http://127.0.0.1:{replica}" for replica in replicas]
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker-urls", *workers, "--policy", "round_robin"]
        command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1"]
        command += ["--prometheus-port", str(free_port())]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # The very file that is documented, with ports of this test.
    text = (HERE / "nginx.conf").read_text()
    for documented, real in [(8081, replicas[0]), (8082, replicas[1]), (8080, port)]:
        assert f"127.0.0.1:{documented}" in text
        text = text.replace(f"127.0.0.1:{documented}", f"127.0.0.1:{real}")
    (folder / "tileinfer.conf").write_text(text)
    places = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    main = f"daemon off; pid {folder}/pid; error_log {folder}/error.log;\nevents {{}}\nhttp {{ access_log off; {places} include {folder}/tileinfer.conf; }}\n"
    (folder / "nginx.conf").write_text(main)
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    return subprocess.Popen([nginx, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")])


def question(marker, stream=False):
    text = f"Repeat the number {marker} and say something about it."
    body = {"model": "model", "messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0}
    return {**body, "stream": True} if stream else body


def ask(port, marker, stream):
    """What came of a question: the text of a whole answer, or None with the reason."""
    try:
        status, text = call(port, "POST", "/v1/chat/completions", question(marker, stream))
    except (OSError, http.client.HTTPException) as error:
        return None, f"cut off: {type(error).__name__}"
    if status != 200:
        return None, f"status {status}"
    if not stream:
        return json.loads(text)["choices"][0]["message"]["content"], None
    events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return None, "cut off: a stream without an end"
    chunks = [json.loads(event) for event in events[:-1]]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks), None


def served(port):
    """How many requests a replica has answered."""
    text = call(port, "GET", "/metrics")[1]
    return sum(float(value) for value in re.findall(r"tileinfer:request_success_total\{[^}]*\} ([\d.]+)", text))


class Load:
    """Clients that ask until they are told to stop."""

    def __init__(self, port, expected):
        self.port, self.expected = port, expected
        self.stop, self.lock = threading.Event(), threading.Lock()
        # (when it was asked, streamed, reason of the failure or None)
        self.outcomes, self.wrong = [], []
        # They end with the program, however it ends.
        self.threads = [threading.Thread(target=self.client, args=(i,), daemon=True) for i in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def client(self, number):
        turn = number
        while not self.stop.is_set():
            marker = list(self.expected)[turn % len(self.expected)]
            stream = turn % 2 == 0
            turn += 5
            asked = time.monotonic()
            text, failure = ask(self.port, marker, stream)
            with self.lock:
                self.outcomes.append((asked, stream, failure))
                if failure is None and text != self.expected[marker]:
                    self.wrong.append((marker, text, self.expected[marker]))
            if failure:
                time.sleep(0.05)

    def answers(self):
        with self.lock:
            return sum(failure is None for _, _, failure in self.outcomes)

    def wait_for_more(self):
        enough = self.answers() + ARGUMENTS.answers
        wait_until(lambda: self.answers() >= enough, f"answers stop coming: {self.outcomes[-9:]}")

    def finish(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()


def main(folder):
    ports, port = [free_port(), free_port()], free_port()
    processes = [replica(ports[0]), replica(ports[1])]
    try:
        for each in ports:
            wait_until(lambda: is_healthy(each), "a replica does not get healthy")
        processes.append(gateway(port, ports, folder))
        wait_until(lambda: is_healthy(port), "the gateway does not get healthy")
        wait_until(lambda: ask(port, 0, False)[1] is None, "the gateway does not route")
        print("health checks: fine", flush=True)

        markers = [1009 + 97 * i for i in range(17)]
        expected = {marker: ask(ports[0], marker, False)[0] for marker in markers}
        assert None not in expected.values() and len(set(expected.values())) > len(markers) // 2, expected

        before = [served(each) for each in ports]
        load = Load(port, expected)
        load.wait_for_more()
        routed = [served(each) - already for each, already in zip(ports, before)]
        assert min(routed) > 0, f"both replicas are used: {routed}"
        assert not any(failure for _, _, failure in load.outcomes), load.outcomes
        print(f"routing: fine, {routed} answers of each", flush=True)

        calm = load.answers()
        processes[1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        load.wait_for_more()
        alone = load.answers()
        # A new one takes its place, and the gateway finds it.
        processes[1].wait()
        processes[1] = replica(ports[1])
        wait_until(lambda: is_healthy(ports[1]), "the new replica does not get healthy")
        wait_until(lambda: served(ports[1]) > 0, "the gateway does not come back to the new replica")
        load.wait_for_more()
        load.finish()
        assert not load.wrong, load.wrong
        failures = [(round(asked - killed, 2), stream, failure) for asked, stream, failure in load.outcomes if failure]
        print(f"one killed: {calm} answers before, {alone - calm} while it was away, {load.answers() - alone} after; none wrong; failed: {failures}", flush=True)
        # Only what was on its way when the replica died may fail: at most one of each client.
        assert len(failures) <= CLIENTS and all(asked < 1 for asked, _, _ in failures), failures
        if ARGUMENTS.gateway == "nginx":
            assert all(stream for _, stream, _ in failures), f"whole answers are asked for again: {failures}"
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
    print("all checks passed")


with tempfile.TemporaryDirectory() as name:
    os.chmod(name, 0o755)
    main(pathlib.Path(name))
