"""The Lambdas: one role each, logs with retention, the environment that their settings class asks for."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.environment import Variable, as_text
from infra.settings import StackSettings
from infra.tags import Component, tags

ROOT = Path(__file__).resolve().parents[2]
LOG_DAYS = 30
TIMEOUT_SECONDS = 15
MEMORY_MB = 512
MANAGED = "arn:aws:iam::aws:policy"
LOGS_POLICY = f"{MANAGED}/service-role/AWSLambdaBasicExecutionRole"
VPC_POLICY = f"{MANAGED}/service-role/AWSLambdaVPCAccessExecutionRole"
TRACES_POLICY = f"{MANAGED}/AWSXRayDaemonWriteAccess"


def assume(service: str) -> str:
    """The trust policy of a service's role."""
    statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def policy(statements: list[dict[str, Any]]) -> pulumi.Output[str]:
    """A policy document of statements that may hold Outputs."""
    return pulumi.Output.json_dumps({"Version": "2012-10-17", "Statement": statements})


class Function(pulumi.ComponentResource):
    """A Lambda from `build/functions/<name>.zip`, which is built before the program runs."""

    def __init__(
        self,
        name: str,
        settings: StackSettings,
        *,
        environment: dict[str, Variable],
        statements: list[dict[str, Any]],
        vpc: dict[str, Any] | None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("chat:functions:Function", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        tagged = tags(settings, Component.API)
        role = aws.iam.Role(name, assume_role_policy=assume("lambda.amazonaws.com"), tags=tagged, opts=child)
        granted: list[pulumi.Resource] = [
            aws.iam.RolePolicyAttachment(f"{name}-{use}", role=role.name, policy_arn=managed, opts=child)
            for use, managed in (("logs", VPC_POLICY if vpc else LOGS_POLICY), ("traces", TRACES_POLICY))
        ]
        if statements:
            granted.append(aws.iam.RolePolicy(name, role=role.id, policy=policy(statements), opts=child))
        logs = aws.cloudwatch.LogGroup(name, retention_in_days=LOG_DAYS, tags=tagged, opts=child)
        archive = ROOT / settings.functions_path / f"{name}.zip"
        self.function = aws.lambda_.Function(
            name,
            role=role.arn,
            runtime=settings.lambda_runtime,
            architectures=[settings.lambda_architecture],
            handler=f"functions.{name}.handler.handler",
            code=pulumi.FileArchive(str(archive)),
            source_code_hash=content_hash(archive),
            memory_size=MEMORY_MB,
            timeout=TIMEOUT_SECONDS,
            environment={"variables": {key: as_text(value) for key, value in environment.items()}},
            vpc_config=vpc,
            logging_config={"log_format": "JSON", "log_group": logs.name},
            tracing_config={"mode": "Active"},
            tags=tagged,
            opts=pulumi.ResourceOptions(parent=self, depends_on=granted),
        )
        self.register_outputs({"arn": self.function.arn})


def content_hash(archive: Path) -> str:
    """Hex SHA-256 of the zip; `missing` before it is built, so that a plan can be made without it."""
    return hashlib.sha256(archive.read_bytes()).hexdigest() if archive.exists() else "missing"
