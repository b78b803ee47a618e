"""API Gateway's token authorizer: any OIDC issuer, by configuration."""

from functools import cache
from typing import Any

from aws_lambda_powertools import Logger

from chat.adapters.oidc import OidcVerifier
from chat.errors import Unauthenticated
from chat.settings import AuthorizerSettings
from functions.common.loop import run

logger = Logger(service="authorizer")


@cache
def verifier() -> OidcVerifier:
    """Keeps the issuer's keys between invocations."""
    settings = AuthorizerSettings.load()
    return OidcVerifier(settings.oidc_issuer, settings.oidc_audience, settings.jwks_url)


def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """A policy for the whole stage, since the answer is cached across routes.

    Raises Exception("Unauthorized"), which API Gateway answers as 401.
    """
    scheme, _, token = str(event.get("authorizationToken") or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Exception("Unauthorized")
    try:
        identity = run(verifier().verify(token.strip()))
    except Unauthenticated:
        raise Exception("Unauthorized") from None
    api, stage, *_ = str(event["methodArn"]).split("/")
    statement = {"Action": "execute-api:Invoke", "Effect": "Allow", "Resource": f"{api}/{stage}/*"}
    return {
        "principalId": identity.user_id,
        "policyDocument": {"Version": "2012-10-17", "Statement": [statement]},
        "context": {"userId": identity.user_id},
    }
