"""LangChain against the server: its loop of tools, an agent of five turns, structures."""

from __future__ import annotations

from typing import Literal

import pytest
from serving import MODEL, scripted
from serving import tool_call as call

langchain_openai = pytest.importorskip("langchain_openai")
agents = pytest.importorskip("langchain.agents")
tools = pytest.importorskip("langchain_core.tools")
pydantic = pytest.importorskip("pydantic")


@tools.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tools.tool
def stop() -> str:
    """Stop."""
    return "stopped"


class Pick(pydantic.BaseModel):
    number: Literal[7]


class Compact(Pick):
    """Written without white space, of which the alphabet's model would write as much as it may."""

    model_config = pydantic.ConfigDict(json_schema_extra={"x-guidance": {"whitespace_flexible": False}})


@pytest.fixture(scope="module")
def server(model):
    with scripted(model) as found:
        yield found


@pytest.fixture
def chat(server):
    options = {"temperature": 0, "max_retries": 0, "extra_body": {"separate_reasoning": False}}
    return langchain_openai.ChatOpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key="none", max_tokens=200, **options
    )


def test_the_loop_of_tools(server, chat):
    """As its guide has it: the model calls, the program runs the calls, the model answers."""
    bound, messages = chat.bind_tools([add, stop]), [("user", "1 + 2?")]
    server.script += [f"I add.\n{call('add', a=1, b=2)}\n{call('stop')}", "It is 3."]
    answer = bound.invoke(messages)
    assert answer.content == "I add."
    messages += [answer, *({"add": add, "stop": stop}[one["name"]].invoke(one) for one in answer.tool_calls)]
    answer = bound.invoke(messages)
    assert (answer.content, answer.tool_calls) == ("It is 3.", [])
    assert server.asked[-1].endswith("</tool_call>;tool:3;tool:stopped;assistant:")


def test_streamed_calls(server, chat):
    server.script.append(call("add", a=5, b=6))
    pieces = list(chat.bind_tools([add], parallel_tool_calls=False).stream("5 + 6?", stream_usage=True))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    (found,) = whole.tool_calls
    assert (found["name"], found["args"]) == ("add", {"a": 5, "b": 6})
    assert whole.usage_metadata["output_tokens"] == len(call("add", a=5, b=6)) + 1


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_of_five_turns(server, chat, streamed):
    agent = agents.create_agent(chat, [add], system_prompt="Add.")
    server.script += [*(call("add", a=i, b=1) for i in range(4)), "It is 4."]
    question, limit = {"messages": [("user", "Count.")]}, {"recursion_limit": 50}
    if streamed:
        pieces = [piece for piece, _ in agent.stream(question, limit, stream_mode="messages")]
        results = [piece.content for piece in pieces if piece.type == "tool"]
        assert "".join(piece.text for piece in pieces if piece.type == "AIMessageChunk") == "It is 4."
    else:
        messages = agent.invoke(question, limit)["messages"]
        results = [one.content for one in messages if one.type == "tool"]
        assert messages[-1].content == "It is 4."
    assert results == [str(i + 1) for i in range(4)]
    assert server.asked[-1].count("<tool_call>") == 4


def test_tools_that_must_be_called_and_structures(server, chat):
    """The model's own answers would be letters."""
    pytest.importorskip("llguidance")
    server.script += [None] * 4
    for choice in ("any", "stop"):
        (found,) = (
            chat.bind_tools([stop], tool_choice=choice, parallel_tool_calls=False).invoke("Go").tool_calls
        )
        assert (found["name"], found["args"]) == ("stop", {})
    for method, kind in (("json_schema", Compact), ("function_calling", Pick)):
        assert chat.with_structured_output(kind, method=method).invoke("Pick.") == kind(number=7)


def test_a_prompt_that_is_too_long_is_known_as_such(server, chat):
    """Programs fall back to another model then."""
    exceptions = pytest.importorskip("langchain_core.exceptions")
    with pytest.raises(exceptions.ContextOverflowError):
        chat.invoke("hello " * 2000)
