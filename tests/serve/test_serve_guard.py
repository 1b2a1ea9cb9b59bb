"""Keys, tenants, sizes, origins, the access log: what every request passes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from servers import make_app
from starlette.testclient import TestClient

from specdec_ext import LLM
from specdec_ext.errors import ConfigError
from specdec_ext.serve.keys import ApiKeys
from specdec_ext.serve.settings import ServerSettings

KEYS = ["first-key-1234", "second-key-5678"]
BODY: dict[str, Any] = {"prompt": "x" * 100, "max_tokens": 2, "temperature": 0}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_path_but_health_needs_a_key(llm: LLM) -> None:
    app = make_app(llm, api_keys=KEYS)
    client = TestClient(app, raise_server_exceptions=False)
    for path in ("/health", "/ready"):
        assert client.get(path).status_code == 200
    paths = set(app.openapi()["paths"]) - {"/health", "/ready", "/"}
    assert len(paths) >= 9
    for path in [*paths, "/nothing", "/openapi.json"]:
        for headers in (
            {},
            bearer("wrong-key-1234"),
            {"Authorization": "Basic " + KEYS[0]},
            bearer(KEYS[0] + "x"),
            bearer(""),
            {"Authorization": "é".encode()},
        ):
            reply = client.get(path, headers=headers)
            assert reply.status_code == 401, path
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
    for key in KEYS:
        assert client.get("/v1/models", headers=bearer(key)).status_code == 200
        assert client.post("/v1/completions", json=BODY, headers=bearer(key)).status_code == 200


def test_owners_of_keys_share_no_cached_prompt(llm: LLM) -> None:
    client = TestClient(make_app(llm, api_keys=KEYS))
    prompt = "a tenant's own words " * 8

    def cached(key: str, **more: Any) -> int:
        body = {**BODY, "prompt": prompt, **more}
        usage = client.post("/v1/completions", json=body, headers=bearer(key)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0
    assert cached(KEYS[1]) == 0
    assert cached(KEYS[0], cache_salt="x") == 0
    assert cached(KEYS[1], cache_salt="x") == 0
    assert cached(KEYS[1]) > 0


def test_salts() -> None:
    open_server, keyed = ApiKeys(()), ApiKeys(KEYS)
    assert open_server.cache_salt(0, None) == "" and open_server.cache_salt(0, "s") == "s"
    salts = {keyed.cache_salt(i, s) for i in (0, 1) for s in (None, "s", "t")}
    assert len(salts) == 6 and not any(key in salt for key in KEYS for salt in salts)
    assert keyed.cache_salt(0, "s") == keyed.cache_salt(0, "s")
    assert ApiKeys(KEYS).cache_salt(0, "s") != keyed.cache_salt(0, "s")


@pytest.mark.parametrize(
    "values",
    [
        {"served_model_names": []}, {"served_model_names": "tiny"}, {"api_keys": ["short"]},
        {"api_keys": ["with\nline-end"]}, {"max_body_bytes": 1}, {"request_seconds": 0},
        {"drain_seconds": -1}, {"default_temperature": float("nan")},
        {"per_request_metrics": "some"}, {"served_model_names": ["m", ""]},
    ],
)  # fmt: skip
def test_settings_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        ServerSettings(**{"served_model_names": ["m"], **values})


def test_a_body_has_a_size(llm: LLM) -> None:
    client = TestClient(make_app(llm, max_body_bytes=2000), raise_server_exceptions=False)
    assert client.post("/v1/completions", json=BODY).status_code == 200

    def parts() -> Iterator[bytes]:
        for _ in range(30):
            yield b"x" * 100

    too_long = json.dumps({**BODY, "user": "u" * 2000})
    for content in (too_long, parts()):  # with its length in front, and without
        reply = client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "request_too_large"


def test_other_origins_only_if_named(llm: LLM) -> None:
    headers = {"Origin": "https://github.com", "Access-Control-Request-Method": "POST"}
    closed = TestClient(make_app(llm), raise_server_exceptions=False)
    assert (
        "access-control-allow-origin" not in closed.options("/v1/models", headers=headers).headers
    )
    opened = TestClient(make_app(llm, cors_origins=["https://github.com"], api_keys=KEYS))
    reply = opened.options("/v1/models", headers=headers)
    assert reply.headers["access-control-allow-origin"] == "https://github.com"


def test_pages_may_send_headers_of_their_own(llm: LLM) -> None:
    """What OpenAI's JavaScript client asks for in front of a request, and then may read."""
    client = TestClient(make_app(llm, cors_origins=["https://github.com"]))
    names = "authorization,content-type,x-stainless-arch,x-stainless-retry-count"
    headers = {"Origin": "https://github.com", "Access-Control-Request-Method": "POST",
               "Access-Control-Request-Headers": names}  # fmt: skip
    asked = client.options("/v1/chat/completions", headers=headers)
    assert asked.status_code == 200, asked.text
    allowed = asked.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
    assert set(names.split(",")) <= set(allowed)
    reply = client.post("/v1/completions", json=BODY, headers={"Origin": "https://github.com"})
    assert "X-Request-Id" in reply.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        ("https://github.com/", "give https://github.com$"),
        ("https://github.com/page", "give https://github.com$"),
        ("HTTPS://GitHub.com:8080", "give https://github.com:8080$"),
        ("github.com", "expected an origin such as"),
        ("http://[::1", "expected an origin such as"),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerSettings(["m"], cors_origins=["*", "http://127.0.0.1:3000", origin])


def test_the_access_log_has_ids_and_counts_but_no_text(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="specdec_ext.access")
    client = TestClient(make_app(llm, api_keys=KEYS), raise_server_exceptions=False)
    secret = "a secret of mine"
    headers = {**bearer(KEYS[1]), "X-Request-Id": "trace-7"}
    for stream in (False, True):
        caplog.clear()
        reply = client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": secret}], "max_tokens": 3,
                  "stream": stream},
            headers=headers,
        )  # fmt: skip
        assert reply.headers["x-request-id"] == "trace-7"
        [line] = [json.loads(record.getMessage()) for record in caplog.records
                  if record.name == "specdec_ext.access"]  # fmt: skip
        assert (line["request_id"], line["status"], line["tenant"]) == ("trace-7", 200, 1)
        assert (line["method"], line["path"]) == ("POST", "/v1/chat/completions")
        assert line["completion_tokens"] == 3 and line["finish_reasons"] == ["length"]
        assert line["prompt_tokens"] > len(secret) and line["bytes"] > 0
        assert secret not in caplog.text and KEYS[1] not in caplog.text
    caplog.clear()
    refused = client.get("/v1/models", headers={"X-Request-Id": "bad id\u00e9".encode()})
    [line] = [json.loads(r.getMessage()) for r in caplog.records if r.name == "specdec_ext.access"]
    assert line["status"] == 401 and line["tenant"] is None
    assert line["request_id"] == refused.headers["x-request-id"] != "bad id"


def test_prompts_are_logged_only_if_asked(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="specdec_ext.access")
    client = TestClient(make_app(llm, log_prompts=True))
    text = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
    line = json.loads(caplog.records[-1].getMessage())
    assert line["prompt"] == [BODY["prompt"]] and line["answer"] == [text]


def test_keys_are_compared_whatever_the_difference() -> None:
    """All keys are looked at: which one fits, and where others differ, is not in the loop."""
    keys = ApiKeys([*KEYS, KEYS[0]])
    assert keys.tenant(f"bearer  {KEYS[1]} ") == 1
    assert keys.tenant(f"Bearer {KEYS[0]}") == 2  # the last of two equal ones
    assert keys.tenant(None) is None and keys.tenant("Bearer") is None
