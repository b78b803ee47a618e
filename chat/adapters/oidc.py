"""Tokens of any OIDC issuer, verified with its published keys.

Keys are cached for ten minutes; an unknown key id asks again, but at most twice a minute, so that forged ids
cannot make this service knock at the issuer. Verified tokens are remembered until they expire.
"""

import asyncio
import hashlib
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import jwt
import msgspec

from chat.errors import Unauthenticated, Unavailable
from chat.ports import Identity

_ALGORITHMS = ("RS256", "ES256")
_LEEWAY_SECONDS = 5
_KEYS_SECONDS = 600
_REFETCH_SECONDS = 30
_RETRY_SECONDS = 1
_FETCH_TIMEOUT_SECONDS = 3
_REMEMBERED = 10_000
_LONGEST_TOKEN = 8192


def fetch(url: str) -> bytes:
    """The document at a URL. Raises OSError."""
    if not url.startswith(("https://", "http://")):
        raise OSError("the address of the keys is no http address")
    with urllib.request.urlopen(url, timeout=_FETCH_TIMEOUT_SECONDS) as response:  # noqa: S310 - scheme checked above
        document: bytes = response.read(1_000_000)
    return document


class OidcVerifier:
    """The port TokenVerifier. `audience` is the token's `aud`, or Cognito's `client_id`."""

    def __init__(
        self,
        issuer: str,
        audience: str,
        jwks_url: str,
        fetch: Callable[[str], bytes] = fetch,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._issuer = issuer
        self._audience = audience
        self._jwks_url = jwks_url
        self._fetch = fetch
        self._clock = clock
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._fetched_at = float("-inf")
        self._failed_at = float("-inf")
        self._fetching = asyncio.Lock()
        self._verified: OrderedDict[bytes, tuple[float, Identity]] = OrderedDict()

    async def verify(self, token: str) -> Identity:
        """Raises Unauthenticated, or Unavailable when the issuer's keys cannot be had."""
        now = self._clock()
        digest = hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        known = self._verified.get(digest)
        if known is not None:
            if known[0] > now:
                self._verified.move_to_end(digest)
                return known[1]
            del self._verified[digest]
        expires_at, identity = await self._check(token)
        self._verified[digest] = (expires_at, identity)
        if len(self._verified) > _REMEMBERED:
            self._verified.popitem(last=False)
        return identity

    async def _check(self, token: str) -> tuple[float, Identity]:
        if len(token) > _LONGEST_TOKEN:
            raise _unauthenticated()
        try:
            header = jwt.get_unverified_header(token)
            key_id, algorithm = header.get("kid"), header.get("alg")
            if algorithm not in _ALGORITHMS or not isinstance(key_id, str):
                raise _unauthenticated()
            key = await self._key(key_id)
            if key is None or key.algorithm_name != algorithm:
                raise _unauthenticated()
            claims = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                issuer=self._issuer,
                leeway=_LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "sub"], "verify_aud": False},
            )
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise _unauthenticated() from error
        return self._identity(claims)

    def _identity(self, claims: Mapping[str, Any]) -> tuple[float, Identity]:
        audience = claims.get("aud", claims.get("client_id"))
        audiences = audience if isinstance(audience, list) else [audience]
        subject = claims["sub"]
        if self._audience not in audiences or not isinstance(subject, str):
            raise _unauthenticated()
        # `~` begins the owners that the stores themselves use.
        if not 0 < len(subject) <= 256 or subject.startswith("~"):
            raise _unauthenticated()
        return float(claims["exp"]) + _LEEWAY_SECONDS, Identity(subject)

    async def _key(self, key_id: str) -> jwt.PyJWK | None:
        """The issuer's key, fetched again when it is old or does not know the id."""
        if self._stale(key_id):
            async with self._fetching:
                if self._stale(key_id) and not await self._refreshed() and key_id not in self._keys:
                    raise Unavailable("The sign-in service does not answer; try again.")
        return self._keys.get(key_id)

    def _stale(self, key_id: str) -> bool:
        age = self._clock() - self._fetched_at
        return age > (_KEYS_SECONDS if key_id in self._keys else _REFETCH_SECONDS)

    async def _refreshed(self) -> bool:
        """Whether the issuer answered. Old keys stay: its outage signs nobody out."""
        if self._clock() - self._failed_at < _RETRY_SECONDS:
            return False
        try:
            self._keys = _parse(await asyncio.to_thread(self._fetch, self._jwks_url))
        except (OSError, ValueError):
            self._failed_at = self._clock()
            return False
        self._fetched_at = self._clock()
        return True


def _parse(document: bytes) -> Mapping[str, jwt.PyJWK]:
    found: dict[str, jwt.PyJWK] = {}
    try:
        entries = msgspec.json.decode(document)["keys"]
        for entry in entries:
            if entry.get("kid") and entry.get("use", "sig") == "sig":
                try:
                    found[entry["kid"]] = jwt.PyJWK(entry)
                except jwt.PyJWTError:
                    continue  # a kind of key that we do not use
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("the issuer's keys are no JWKS document") from error
    return found


def _unauthenticated() -> Unauthenticated:
    return Unauthenticated("The access token is missing, malformed, expired or of another issuer.")
