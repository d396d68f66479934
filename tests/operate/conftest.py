"""A server of our own that answers as SGLang does on the routes that are asked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest


class StandIn:
    """Answers with what it holds.

    Attributes:
        info: What `/server_info` says.
        exported: What `/metrics` says, or None where it is not there.
        api_key, admin_key: Wanted on every route, and on the control route.
        commands: What came in at `/set_internal_state`.
        on_command: Called with each; its result is the answer.
    """

    def __init__(self) -> None:
        self.info: dict[str, Any] = {"version": "0.5.23", "internal_states": [{}]}
        self.exported: str | None = None
        self.api_key: str | None = None
        self.admin_key: str | None = None
        self.commands: list[dict[str, Any]] = []
        self.on_command: Callable[[dict[str, Any]], list[bool]] = lambda command: [True]
        self.url = ""

    def shows(self, **state: Any) -> None:
        """Let the plugin show a state."""
        self.info["internal_states"] = [{"kvdefrag": state}]


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandIn

    def do_GET(self) -> None:
        made = self.stand_in
        if self.path == "/server_info":
            self._answer(made.info, made.api_key)
        elif self.path == "/metrics" and made.exported is not None:
            self._answer(made.exported, None)
        else:
            self._send(404, "{}")

    def do_POST(self) -> None:
        made = self.stand_in
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wanted = made.admin_key or made.api_key
        if wanted and self.headers.get("Authorization") != f"Bearer {wanted}":
            self._send(401, "{}")
            return
        command = json.loads(body["rid"])
        made.commands.append(command)
        self._send(200, json.dumps(made.on_command(command)))

    def _answer(self, content: Any, wanted: str | None) -> None:
        if wanted and self.headers.get("Authorization") != f"Bearer {wanted}":
            self._send(401, "{}")
            return
        self._send(200, content if isinstance(content, str) else json.dumps(content))

    def _send(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """A server that shows nothing of kvdefrag."""
    made = StandIn()
    handler = type("Handler", (_Handler,), {"stand_in": made})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("KVDEFRAG_", "SGLANG_"))]:
        monkeypatch.delenv(name)
