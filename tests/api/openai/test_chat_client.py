"""`stoker chat` against a server."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from api_server import Running
from fake_engine import SPOKEN

from stoker_runtime.terminal import chat


@pytest.fixture
def conversation(http: httpx.Client) -> chat.Conversation:
    return chat.Conversation(http, "byte-model", {"max_tokens": 9})


def test_the_conversation_goes_whole_with_each_question(server: Running, conversation: chat.Conversation) -> None:
    shown: list[str] = []
    conversation.reset("be kind")
    answer = conversation.ask("one", shown.append)
    conversation.ask("two", shown.append)
    assert "".join(shown) == SPOKEN[:9] * 2
    assert answer.tokens == 9
    assert answer.summary().startswith("9 tokens, ")
    prompt = bytes(server.engine.requests[-1].prompt_token_ids).decode()
    assert prompt == f"[system]be kind\n[user]one\n[assistant]{SPOKEN[:9]}\n[user]two\n[assistant]"
    conversation.reset()
    assert conversation.messages == []


def test_errors_are_sentences_and_leave_no_question_behind(server: Running, conversation: chat.Conversation) -> None:
    conversation.model = "other"
    with pytest.raises(chat.ChatError, match="The model `other` does not exist"):
        conversation.ask("x", print)
    assert conversation.messages == []
    conversation.model = "byte-model"
    server.engine.fail_after, server.engine.delay = 2, 0.01
    with pytest.raises(chat.ChatError, match="The step failed"):
        conversation.ask("x", lambda _: None)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


def test_main_asks_one_thing(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["--url", server.url, "--max-tokens", "3", "hello", "there"]) == 0
    assert capsys.readouterr().out == "The\n"


def test_main_converses(server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Iterator[str] = iter(["hi", "/reset", "/help", "", "again", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert chat.main(["--url", server.url, "--max-tokens", "3"]) == 0
    said = capsys.readouterr().out
    assert said.count("The\n[3 tokens") == 2
    assert chat.HELP in said
    prompts = [bytes(request.prompt_token_ids).decode() for request in server.engine.requests]
    assert prompts == ["[user]hi\n[assistant]", "[user]again\n[assistant]"]


def test_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["--url", "http://127.0.0.1:9", "hi"]) == 1
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err


def test_a_url_without_a_scheme_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["--url", "localhost:8000", "hi"]) == 2
    assert "--url is 'localhost:8000'; it must begin with http://" in capsys.readouterr().err


def test_commands_answer(server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Iterator[str] = iter(["/system be brief", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert chat.main(["--url", server.url]) == 0
    assert "[forgotten; system message: be brief]" in capsys.readouterr().out
