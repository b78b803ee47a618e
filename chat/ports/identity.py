"""Who calls."""

from typing import Protocol

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """A verified caller."""

    user_id: str


class TokenVerifier(Protocol):
    """Verifies issuer, audience, algorithm, signature and expiry."""

    async def verify(self, token: str) -> Identity:
        """Raises Unauthenticated."""
        ...
