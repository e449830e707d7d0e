"""The server's OpenAPI document names every path and every field, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from serving import running

from flashtile.engine.server.app import UNSERVED, make_app
from flashtile.engine.server.errors import ApiError
from flashtile.engine.server.listener import Listener
from flashtile.engine.server.openapi import DEVELOPMENT, READERS, document
from flashtile.engine.server.protocol import Body
from flashtile.engine.server.service import Limits

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "server.md").read_text()
PAGES = {"/", "/docs"}


def codes_of(path: str, **fields: object) -> set[str | None]:
    """The codes of the errors that a parser raises for a path's examples with these fields; None: none."""
    read, examples = READERS[path]
    found: set[str | None] = set()
    for example in examples:
        try:
            read(Body({**example, **fields}), 20)
            found.add(None)
        except ApiError as error:
            found.add(error.code)
    return found


@pytest.mark.parametrize("development", [False, True])
def test_every_path_is_described_by_the_server(model, development):
    with running(model, Limits(server_dev_mode=development)) as server:
        status, found = server.ask("/openapi.json")
        app = make_app(server.service, Listener(Limits()))
    assert (status, found) == (200, document(Limits().max_logprobs, development))
    off = UNSERVED.keys() | ({} if development else {path for _, path in DEVELOPMENT})
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.method != "HEAD" and route.resource.canonical not in off
    }
    described = {(method, path) for path, methods in found["paths"].items() for method in methods}
    assert described == {pair for pair in routes if pair[1] not in PAGES}
    for _, path in described:
        assert path.replace("{name}", "NAME").removeprefix("/v1/models") in GUIDE, path


@pytest.mark.parametrize("path", READERS)
def test_documented_fields_are_those_that_calls_take(path):
    content = document(20, True)["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    fields = content["schema"]["properties"].keys() - {"model"}  # is read before the others
    assert codes_of(path) == {None}  # the examples
    assert codes_of(path, no_such_field=1) == {"unknown_field"}
    assert [name for name in fields if codes_of(path, **{name: 1.5}) == {"unknown_field"}] == []
    if "stream" in fields:
        assert [name for name in fields if not re.search(rf"`{name}`", GUIDE)] == []


def test_types_and_ranges_are_those_of_the_parsers():
    content = document(5)["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    fields = content["schema"]["properties"]
    assert fields["logprobs"] == {"type": "integer", "minimum": 0, "maximum": 5}
    assert fields["temperature"] == {"type": "number", "default": 1.0}
    assert fields["stop"] == {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    assert fields["echo"] == {"type": "boolean", "default": False}
    assert fields["seed"] == {"type": "integer"}
