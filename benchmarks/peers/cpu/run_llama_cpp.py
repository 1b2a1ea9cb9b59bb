"""Worker: llama.cpp's server, a process of its own, asked over HTTP on the loopback."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.peers.cpu import job as jobs

CONTEXT = 2048  # tokens of one sequence
# The keys of 3 and drafts of 10 tokens that this package's prompt lookup uses.
LOOKUP_SIZES = {"size-n": "3", "size-m": "10"}


def method_options(method: str) -> list[str]:
    """The server's options: two of its lookups, or none."""
    kind = {"plain": None, "lookup": "ngram-simple", "map": "ngram-map-k"}[method]
    if kind is None:
        return []
    sizes = [part for k, v in LOOKUP_SIZES.items() for part in (f"--spec-{kind}-{k}", v)]
    return ["--spec-type", kind, *sizes]


class Server:
    """One llama-server with `slots` sequences, up when the constructor returns."""

    def __init__(self, job: dict[str, Any], slots: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        threads = str(job["threads"])
        command = [os.environ["LLAMA_SERVER"], "--model", job["model"], "--port", str(self.port)]
        command += ["--threads", threads, "--threads-batch", threads, "--parallel", str(slots)]
        command += ["--ctx-size", str(slots * CONTEXT), "--cache-ram", "0", "--offline"]
        command += method_options(job["method"])
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not self._is_up():
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self.process.returncode}")
            time.sleep(0.005)

    def _is_up(self) -> bool:
        try:
            return self._ask("GET", "/health", None)[0] == 200
        except OSError:
            return False

    def _ask(self, verb: str, path: str, body: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request(verb, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        content = json.loads(response.read())
        connection.close()
        return response.status, content

    def complete(self, ids: list[int], max_tokens: int) -> list[int]:
        return [int(i) for i in self._answer(ids, max_tokens)["tokens"]]

    def scored(self, ids: list[int], max_tokens: int, best: int) -> list[dict[int, float]]:
        """For each token of the answer the `best` ones at its place and their log-probabilities,
        the token itself first."""
        places = self._answer(ids, max_tokens, n_probs=best)["completion_probabilities"]
        return [
            {int(place["id"]): float(place["logprob"])}
            | {int(x["id"]): float(x["logprob"]) for x in place["top_logprobs"]}
            for place in places
        ]

    def _answer(self, ids: list[int], max_tokens: int, **more: Any) -> Any:
        body = {"prompt": ids, "n_predict": max_tokens, "temperature": 0, "return_tokens": True,
                "cache_prompt": False, **more}  # fmt: skip
        status, answer = self._ask("POST", "/completion", body)
        if status != 200:
            raise RuntimeError(f"llama-server: {answer}")
        return answer

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._server = Server(job, 1)
        self.version = job["version"]
        self.pids = [self._server.process.pid]
        self._slots = 1

    def generate(self, ids: list[int], max_tokens: int) -> list[int]:
        return self._server.complete(ids, max_tokens)

    def generate_batch(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        if self._slots == 1:  # a server with slots for all, started once
            self._slots = len(self._job["batch"])
            self._server.close()
            self._server = Server(self._job, self._slots)
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self._server.complete(ids, max_tokens), prompts))

    def close(self) -> None:
        self._server.close()


if __name__ == "__main__":
    jobs.serve(Engine)
