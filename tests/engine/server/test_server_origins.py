"""Calls by web pages of other origins, and the log line of each call."""

from __future__ import annotations

import http.client
import logging
import re

import pytest
from serving import running, wait_for

from flashtile.engine.server.service import Limits
from walk import walk

PAGE = "https://page.example"
FIELDS = {"prompt": "abc", "max_tokens": 4, "store": True}


@pytest.fixture(scope="module")
def server(model):
    with running(model, Limits(api_keys=("sesame",), cors_origins=(PAGE, "app://other"))) as found:
        yield found


def preflight(server, origin):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-own"}
    connection.request("OPTIONS", "/v1/completions", headers={"Origin": origin, **asked})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response


def test_a_browser_is_told_that_a_page_may_call(server):
    """Without a key, because browsers send none before they know."""
    for origin in (PAGE, "app://other"):
        response = preflight(server, origin)
        assert response.status == 204
        assert response.getheader("Access-Control-Allow-Origin") == origin
        assert response.getheader("Access-Control-Allow-Headers") == "authorization,x-own"
        assert "POST" in response.getheader("Access-Control-Allow-Methods")
        assert response.getheader("Access-Control-Max-Age") == "600"
    for origin in ("https://page.example.org", "http://page.example", "null", PAGE + ":81"):
        response = preflight(server, origin)
        assert response.status in (401, 405)
        assert response.getheader("Access-Control-Allow-Origin") is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_may_read_answers_and_errors(server, stream):
    key = {"Authorization": "Bearer sesame"}
    for headers, status in ((key, 200), ({}, 401)):
        for origin in (PAGE, "https://other.example"):
            response = server.send(
                "/v1/completions", {**FIELDS, "stream": stream}, {**headers, "Origin": origin}
            )
            response.read()
            assert response.status == status
            allowed = response.getheader("Access-Control-Allow-Origin")
            assert allowed == (PAGE if origin == PAGE else None)
            assert response.getheader("Vary") == "Origin"
            assert (
                "X-Ignored-Fields" in (response.getheader("Access-Control-Expose-Headers") or "")
                or not allowed
            )


def test_every_origin_or_none(model):
    for origins, allowed in ((("*",), PAGE), ((), None)):
        with running(model, Limits(cors_origins=origins)) as server:
            response = server.send("/v1/models", headers={"Origin": PAGE})
            response.read()
            assert response.getheader("Access-Control-Allow-Origin") == allowed
            assert preflight(server, PAGE).status == (204 if allowed else 405)


@walk("origin", ["", "page.example", "https://page.example/", "https://a\r\nb", "https://Page"])
def test_a_wrong_origin(origin):
    with pytest.raises(ValueError, match="cors_origin must be"):
        Limits(cors_origins=(origin,))


def test_a_call_is_a_line_of_the_log(model, caplog):
    caplog.set_level(logging.INFO, "flashtile.server")
    with running(model) as server:
        server.complete(prompt="abc", max_tokens=4, n=2)
        server.events("/v1/completions", prompt="abc", max_tokens=5)
        server.ask("/v1/completions", {"prompt": 1})
        server.ask("/health")
        lines = []

        def count():
            lines[:] = [one.getMessage() for one in caplog.records if " ms" in one.getMessage()]
            return len(lines)

        wait_for(lambda: count() == 3)
    shown = [re.sub(r" \d+ ms", " N ms", line) for line in lines]
    assert shown == [
        "127.0.0.1 POST /v1/completions 200 N ms, 3 prompt and 8 generated tokens",
        "127.0.0.1 POST /v1/completions 200 N ms, 3 prompt and 5 generated tokens",
        "127.0.0.1 POST /v1/completions 400 N ms",
    ]


def test_a_log_that_is_not_wanted(model, caplog):
    caplog.set_level(logging.INFO, "flashtile.server")
    with running(model, Limits(access_log=False)) as server:
        server.complete(prompt="abc", max_tokens=4)
    assert not [one for one in caplog.records if " ms" in one.getMessage()]
