"""Secrets: containers get a reference and ECS reads the value; it never stands in a task definition."""

from typing import Any

import pulumi
import pulumi_aws as aws

from infra.settings import StackSettings
from infra.tags import Component, tags


class Secret(pulumi.ComponentResource):
    """A text in Secrets Manager, 0.40 USD a month. `value` stays encrypted in the stack's state."""

    def __init__(
        self,
        name: str,
        settings: StackSettings,
        text: str,
        component: Component,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("chat:secret:Secret", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        self.value = pulumi.Output.secret(text)
        secret = aws.secretsmanager.Secret(name, tags=tags(settings, component), opts=child)
        version = aws.secretsmanager.SecretVersion(name, secret_id=secret.id, secret_string=self.value, opts=child)
        # Through the version, so that whoever uses the reference waits until there is a value.
        self.arn: pulumi.Output[str] = version.secret_arn
        self.register_outputs({"arn": self.arn})

    def statement(self) -> dict[str, Any]:
        """The IAM statement of who may read it."""
        return {"Effect": "Allow", "Action": ["secretsmanager:GetSecretValue"], "Resource": [self.arn]}
