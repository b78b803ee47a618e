"""Sign-in: a Cognito user pool and the public client of the web page."""

import pulumi
import pulumi_aws as aws

from infra.settings import StackSettings
from infra.tags import Component, tags


class Identity(pulumi.ComponentResource):
    """`issuer`, `audience` and `jwks_url` are what verifies a token."""

    def __init__(self, name: str, settings: StackSettings, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("chat:identity:Identity", name, None, opts)
        child = pulumi.ResourceOptions(parent=self, protect=settings.protect_data)
        self.pool = aws.cognito.UserPool(
            f"{name}-users",
            password_policy={"minimum_length": 12, "require_lowercase": True, "require_numbers": True},
            deletion_protection="ACTIVE" if settings.protect_data else "INACTIVE",
            tags=tags(settings, Component.IDENTITY),
            opts=child,
        )
        self.client = aws.cognito.UserPoolClient(
            f"{name}-web",
            user_pool_id=self.pool.id,
            generate_secret=False,
            explicit_auth_flows=["ALLOW_USER_PASSWORD_AUTH", "ALLOW_REFRESH_TOKEN_AUTH"],
            prevent_user_existence_errors="ENABLED",
            id_token_validity=12,
            access_token_validity=12,
            token_validity_units={"id_token": "hours", "access_token": "hours"},
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.issuer = self.pool.endpoint.apply(lambda endpoint: f"https://{endpoint}")
        self.audience = self.client.id
        base = settings.jwks_base_url
        keys = "/.well-known/jwks.json"
        self.jwks_url = (
            pulumi.Output.concat(base, "/", self.pool.id, keys) if base else pulumi.Output.concat(self.issuer, keys)
        )
        self.register_outputs({"issuer": self.issuer})
