"""A running server over HTTP: its state, its metrics and its control route."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from kvdefrag.errors import KvdefragError


class ServerError(KvdefragError):
    """A server does not answer, or answers with a refusal; says which in plain words."""


class Server:
    """An SGLang server.

    Args:
        url: Its address, with or without `http://`.
        api_key: Its API key, if it has one.
        admin_key: Its admin key, if it has one; by default the API key.
        timeout_s: Seconds to wait for an answer.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._api_key, self._admin_key, self._timeout = api_key, admin_key or api_key, timeout_s

    def info(self) -> dict[str, Any]:
        """Return what `/server_info` says."""
        found = json.loads(self._call("/server_info", key=self._api_key))
        if not isinstance(found, dict):
            raise ServerError(f"{self.url}/server_info: not what an SGLang server answers")
        return found

    def states(self) -> list[dict[str, Any]]:
        """Return what kvdefrag shows of itself, one for each data-parallel rank.

        Raises:
            ServerError: No rank shows anything: the plugin is not loaded there.
        """
        found = plugin_states(self.info())
        if not found:
            raise ServerError(
                f"{self.url}: kvdefrag is not loaded there; `kvdefrag doctor --url {self.url}` "
                "says why"
            )
        return found

    def metrics(self) -> str | None:
        """Return what `/metrics` exports, or None where metrics are off."""
        try:
            return self._call("/metrics", key=self._api_key)
        except ServerError:
            return None

    def set_internal_state(self, command: str) -> list[bool]:
        """Send a command to every rank; return which have taken it."""
        body = {"rid": command, "server_args": {"kvdefrag": 1}}
        found = json.loads(self._call("/set_internal_state", key=self._admin_key, body=body))
        return [bool(answer) for answer in found]

    def _call(self, path: str, *, key: str | None, body: object = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data)
        request.add_header("Content-Type", "application/json")
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError as error:
            error.close()  # it is an answer, and holds its socket
            raise ServerError(f"{self.url}{path}: {_refused(error.code)}") from error
        except (urllib.error.URLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(f"{self.url}: no answer: {reason}") from error


def plugin_states(info: dict[str, Any]) -> list[dict[str, Any]]:
    """Return kvdefrag's part of each internal state that has one."""
    states = [s.get("kvdefrag") for s in info.get("internal_states") or []]
    return [s for s in states if isinstance(s, dict)]


def _refused(code: int) -> str:
    if code in (401, 403):
        return (
            f"refused ({code}): the server wants a key; give --api-key, or --admin-key where it "
            "was started with --admin-api-key"
        )
    if code == 404:
        return "not found (404): not an SGLang server, or one that lacks this route"
    return f"refused with HTTP status {code}"
