"""Tokens: what verifies, what does not, and how often the issuer is asked."""

import asyncio
import base64
import time
from collections.abc import Callable
from typing import Any

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from chat.adapters.oidc import OidcVerifier
from chat.errors import Unauthenticated, Unavailable

ISSUER, AUDIENCE = "https://issuer.example/pool", "client-1"
RSA_KEY = rsa.generate_private_key(65537, 2048)
OTHER_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())


class Issuer:
    """Publishes keys, and counts how often it is asked."""

    def __init__(self, **keys: Any) -> None:
        self.keys = keys
        self.asked = 0
        self.away = False
        self.now = 1000.0

    def fetch(self, url: str) -> bytes:
        self.asked += 1
        if self.away:
            raise OSError("away")
        published = []
        for ident, key in self.keys.items():
            kind = (
                jwt.algorithms.ECAlgorithm
                if isinstance(key, ec.EllipticCurvePrivateKey)
                else jwt.algorithms.RSAAlgorithm
            )
            published.append({**kind.to_jwk(key.public_key(), as_dict=True), "kid": ident, "use": "sig"})
        return msgspec.json.encode({"keys": [*published, {"kid": "odd", "kty": "none"}]})

    def verifier(self) -> OidcVerifier:
        return OidcVerifier(ISSUER, AUDIENCE, "https://issuer.example/keys", self.fetch, lambda: self.now)


def token(key: Any = RSA_KEY, kid: str = "one", algorithm: str = "RS256", **changed: Any) -> str:
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ada", "exp": time.time() + 600} | changed
    return jwt.encode({n: v for n, v in claims.items() if v is not None}, key, algorithm, headers={"kid": kid})


@pytest.mark.parametrize(
    "make",
    [
        token,
        lambda: token(EC_KEY, "two", "ES256"),
        lambda: token(aud=["x", AUDIENCE]),
        lambda: token(aud=None, client_id=AUDIENCE),
        lambda: token(exp=time.time() - 2),
    ],
)
async def test_good_tokens(make: Callable[[], str]) -> None:
    assert (await Issuer(one=RSA_KEY, two=EC_KEY).verifier().verify(make())).user_id == "ada"


@pytest.mark.parametrize(
    "make",
    [
        lambda: "",
        lambda: "x",
        lambda: "a.b.c",
        lambda: "..",
        lambda: "é\ud800.x.y",
        lambda: "a" * 100_000,
        lambda: token(OTHER_KEY),
        lambda: token(EC_KEY, "one", "ES256"),
        lambda: token("secret" * 10, algorithm="HS256"),
        lambda: token(None, algorithm="none"),
        lambda: token(exp=time.time() - 60),
        lambda: token(exp=None),
        lambda: token(nbf=time.time() + 600),
        lambda: token(iss="https://elsewhere.example"),
        lambda: token(iss=None),
        lambda: token(aud="another"),
        lambda: token(aud=None),
        lambda: token(aud=None, client_id="another"),
        lambda: token(sub=None),
        lambda: token(sub=""),
        lambda: token(sub="~deleted"),
        lambda: token(sub="a" * 300),
        lambda: token(algorithm="RS512"),
        lambda: token()[:-4] + "AAAA",
    ],
)
async def test_bad_tokens(make: Callable[[], str]) -> None:
    with pytest.raises(Unauthenticated):
        await Issuer(one=RSA_KEY, two=EC_KEY).verifier().verify(make())


async def test_a_public_key_is_no_shared_secret() -> None:
    """The classic confusion: HS256 with the issuer's public key as the secret."""
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"one"}').rstrip(b"=").decode()
    body = token().split(".")[1]
    with pytest.raises(Unauthenticated):
        await Issuer(one=RSA_KEY).verifier().verify(f"{head}.{body}.c2ln")


async def test_keys_are_asked_for_once_however_many_ask_at_once() -> None:
    issuer = Issuer(one=RSA_KEY)
    verifier = issuer.verifier()
    tokens = [token(sub=f"u{number}") for number in range(20)]
    found = await asyncio.gather(*(verifier.verify(one) for one in tokens))
    assert [one.user_id for one in found] == [f"u{number}" for number in range(20)]
    assert issuer.asked == 1


async def test_a_verified_token_is_remembered_until_it_expires() -> None:
    issuer = Issuer(one=RSA_KEY)
    issuer.now = time.time()
    verifier, good = issuer.verifier(), token(exp=time.time() + 3)
    await verifier.verify(good)
    issuer.away = True
    await verifier.verify(good)
    issuer.now += 60
    # Asked for again, it is verified again: the library's own clock finds it good, the issuer need not answer.
    assert len(verifier._verified) == 1
    await verifier.verify(good)


async def test_a_new_key_is_found_and_forged_ids_do_not_hammer_the_issuer() -> None:
    issuer = Issuer(one=RSA_KEY)
    verifier = issuer.verifier()
    await verifier.verify(token())
    issuer.keys["new"] = OTHER_KEY
    with pytest.raises(Unauthenticated):
        await verifier.verify(token(OTHER_KEY, "new"))
    assert issuer.asked == 1
    issuer.now += 31
    assert (await verifier.verify(token(OTHER_KEY, "new"))).user_id == "ada"
    for number in range(20):
        with pytest.raises(Unauthenticated):
            await verifier.verify(token(kid=f"forged{number}"))
    assert issuer.asked == 2


async def test_an_issuer_that_is_away_signs_nobody_out() -> None:
    issuer = Issuer(one=RSA_KEY)
    issuer.away = True
    verifier = issuer.verifier()
    for _ in range(5):
        with pytest.raises(Unavailable) as caught:
            await verifier.verify(token())
    assert issuer.asked == 1
    assert caught.value.retry_after
    issuer.away, issuer.now = False, issuer.now + 2
    await verifier.verify(token())
    issuer.away, issuer.now = True, issuer.now + 700
    assert (await verifier.verify(token(sub="bob"))).user_id == "bob"


async def test_a_document_that_is_no_jwks_is_an_issuer_that_is_away() -> None:
    for document in (b"", b"[]", b'{"keys": 5}', b'{"keys": [1]}', b"\xff"):
        verifier = OidcVerifier(ISSUER, AUDIENCE, "", lambda url, document=document: document)  # type: ignore[misc]
        with pytest.raises(Unavailable):
            await verifier.verify(token())
