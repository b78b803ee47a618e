"""Which resource has which physical id, and from which inputs it was made; survives restarts."""

import hashlib
import json
from pathlib import Path
from typing import Any


class State:
    """A small JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}

    def ident(self, key: str) -> str | None:
        """The physical id."""
        return self._entries.get(key, {}).get("id")

    def unchanged(self, key: str, inputs: Any) -> bool:
        """Whether the resource was last made from equal inputs."""
        return self._entries.get(key, {}).get("inputs") == fingerprint(inputs)

    def remember(self, key: str, ident: str, inputs: Any) -> None:
        """Note a made resource."""
        self._entries[key] = {"id": ident, "inputs": fingerprint(inputs)}

    def save(self) -> None:
        """Write it, whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(self._entries, indent=1, sort_keys=True))
        draft.replace(self._path)


def fingerprint(inputs: Any) -> str:
    """A digest of plain inputs."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()
