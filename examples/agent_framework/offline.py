"""A chat client that needs no network: it plays a model from a script, one turn after another."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Mapping, Sequence
from typing import Any

from agent_framework import (
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationLayer,
    Message,
    ResponseStream,
)
from agent_framework.observability import ChatTelemetryLayer

Turn = str | Sequence[tuple[str, str, Mapping[str, Any]]]
"""What the model says in a turn: a text, or calls of tools as (call id, tool, arguments)."""


class OfflineChatClient(
    FunctionInvocationLayer[Any],
    ChatMiddlewareLayer[Any],
    ChatTelemetryLayer[Any],
    BaseChatClient[Any],
):
    """Plays the turns it is given; the framework's own layers do the rest, as for any client."""

    def __init__(self, *turns: Turn, **kwargs: Any) -> None:
        """Takes the script.

        Args:
            turns: What the model says, turn by turn.
            kwargs: What the framework's layers take, such as ``middleware``.
        """
        super().__init__(**kwargs)
        self._turns = list(turns)
        self.requests: list[list[Message]] = []
        """The messages that the model was sent in each turn."""

    def _inner_get_response(
        self,
        *,
        messages: Sequence[Message],
        stream: bool,
        options: Mapping[str, Any],
        **kwargs: Any,
    ) -> Awaitable[ChatResponse] | ResponseStream[ChatResponseUpdate, ChatResponse]:
        self.requests.append(list(messages))
        contents = _contents(self._turns.pop(0))

        async def updates() -> AsyncIterable[ChatResponseUpdate]:
            for content in contents:
                yield ChatResponseUpdate(contents=[content], role="assistant")

        async def response() -> ChatResponse:
            return ChatResponse(messages=[Message(role="assistant", contents=contents)])

        if not stream:
            return response()
        return ResponseStream(updates(), finalizer=ChatResponse.from_updates)


def _contents(turn: Turn) -> list[Content]:
    if isinstance(turn, str):
        return [Content.from_text(turn)]
    return [
        Content.from_function_call(call_id=call_id, name=tool, arguments=dict(arguments))
        for call_id, tool, arguments in turn
    ]
