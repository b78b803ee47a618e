"""The token authorizer: a policy for the whole stage, or the word that API Gateway answers as 401."""

from typing import Any

import pytest

from chat.errors import Unauthenticated
from chat.ports import Identity
from functions.authorizer import handler as authorizer

ARN = "arn:aws:execute-api:eu-central-1:123456789012:api1/live/GET/v1/conversations/conv_1/messages"


class Verifier:
    async def verify(self, token: str) -> Identity:
        if token != "good":
            raise Unauthenticated("no")
        return Identity("ada")


@pytest.fixture(autouse=True)
def verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorizer, "verifier", Verifier)


def authorize(given: str | None) -> dict[str, Any]:
    return authorizer.handler({"type": "TOKEN", "authorizationToken": given, "methodArn": ARN}, None)


@pytest.mark.parametrize("given", ["Bearer good", "bearer good", "Bearer  good "])
def test_a_good_token_opens_the_whole_stage(given: str) -> None:
    policy = authorize(given)
    assert policy["context"] == {"userId": "ada"}
    (statement,) = policy["policyDocument"]["Statement"]
    assert (statement["Effect"], statement["Resource"]) == (
        "Allow",
        "arn:aws:execute-api:eu-central-1:123456789012:api1/live/*",
    )


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", "good", "Basic good", "Bearer bad"])
def test_anything_else_is_unauthorized(given: str | None) -> None:
    with pytest.raises(Exception, match=r"^Unauthorized$"):
        authorize(given)
