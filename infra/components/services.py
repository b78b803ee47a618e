"""The containers on Fargate: streamer, dispatcher, and a worker for each pool."""

from typing import Any

import pulumi
import pulumi_aws as aws

from infra.components.balancer import Balancer
from infra.components.functions import LOG_DAYS, assume, policy
from infra.components.network import HTTP_PORT, Network
from infra.components.secret import Secret
from infra.environment import Variable
from infra.settings import StackSettings
from infra.tags import Component, tags

STOP_SECONDS = 120
"""Fargate's most; every runtime's drain time is shorter."""

START_SECONDS = 300
"""ECS's most: how long a container may fail its health check while it starts, for loading a model."""

HEALTH_CHECK = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{HTTP_PORT}/healthz', timeout=3)"
EXECUTION_POLICY = "arn:aws:iam::aws:policy/service-role/AmazonECSTaskExecutionRolePolicy"


class Service(pulumi.ComponentResource):
    """One service: its task runs `python -m containers.<container>.app` in its image."""

    def __init__(
        self,
        name: str,
        settings: StackSettings,
        *,
        container: str,
        component: Component,
        count: int,
        cluster: aws.ecs.Cluster,
        network: Network,
        region: str,
        environment: dict[str, Variable],
        statements: list[dict[str, Any]],
        cpu: int = 1024,
        memory: int = 2048,
        balancer: Balancer | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("chat:services:Service", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        tagged = tags(settings, component)
        secrets = {key: value for key, value in environment.items() if isinstance(value, Secret)}
        task_role, execution_role = self._roles(name, tagged, statements, secrets)
        logs = aws.cloudwatch.LogGroup(name, retention_in_days=LOG_DAYS, tags=tagged, opts=child)
        self.task = aws.ecs.TaskDefinition(
            name,
            family=name,
            requires_compatibilities=["FARGATE"],
            network_mode="awsvpc",
            cpu=str(cpu),
            memory=str(memory),
            runtime_platform={"cpu_architecture": "ARM64", "operating_system_family": "LINUX"},
            task_role_arn=task_role.arn,
            execution_role_arn=execution_role.arn,
            container_definitions=_definitions(
                container, settings.images[container], environment, secrets, logs.name, region
            ),
            tags=tagged,
            opts=child,
        )
        self.service = aws.ecs.Service(
            name,
            cluster=cluster.arn,
            task_definition=self.task.arn,
            desired_count=count,
            launch_type="FARGATE",
            network_configuration=network.placement(),
            load_balancers=[balancer.target(container)] if balancer else [],
            deployment_circuit_breaker={"enable": True, "rollback": True},
            deployment_minimum_healthy_percent=100,
            deployment_maximum_percent=200,
            propagate_tags="SERVICE",
            tags=tagged,
            # ECS refuses a target group that no listener uses yet.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[balancer.listener] if balancer else None),
        )
        self.register_outputs({})

    def _roles(
        self, name: str, tagged: dict[str, str], statements: list[dict[str, Any]], secrets: dict[str, Secret]
    ) -> tuple[aws.iam.Role, aws.iam.Role]:
        """Of the code, with its statements, and of ECS that starts it: images, logs, these secrets."""
        child = pulumi.ResourceOptions(parent=self)
        trust = assume("ecs-tasks.amazonaws.com")
        task = aws.iam.Role(name, assume_role_policy=trust, tags=tagged, opts=child)
        aws.iam.RolePolicy(name, role=task.id, policy=policy(statements), opts=child)
        execution = aws.iam.Role(f"{name}-execution", assume_role_policy=trust, tags=tagged, opts=child)
        aws.iam.RolePolicyAttachment(name, role=execution.name, policy_arn=EXECUTION_POLICY, opts=child)
        if secrets:
            read = policy([secret.statement() for secret in secrets.values()])
            aws.iam.RolePolicy(f"{name}-execution", role=execution.id, policy=read, opts=child)
        return task, execution


def _definitions(
    container: str,
    image: str,
    environment: dict[str, Variable],
    secrets: dict[str, Secret],
    log_group: pulumi.Output[str],
    region: str,
) -> pulumi.Output[str]:
    plain = {key: value for key, value in sorted(environment.items()) if key not in secrets}
    definition: dict[str, Any] = {
        "name": container,
        "image": image,
        "essential": True,
        "readonlyRootFilesystem": True,
        "user": "10001",
        "portMappings": [{"containerPort": HTTP_PORT, "protocol": "tcp"}],
        "environment": [{"name": key, "value": value} for key, value in plain.items()],
        "secrets": [{"name": key, "valueFrom": secret.arn} for key, secret in sorted(secrets.items())],
        # ECS does not read the image's own HEALTHCHECK.
        "healthCheck": {
            "command": ["CMD", "python3", "-c", HEALTH_CHECK],
            "interval": 10,
            "timeout": 5,
            "retries": 3,
            "startPeriod": START_SECONDS,
        },
        "stopTimeout": STOP_SECONDS,
        "logConfiguration": {
            "logDriver": "awslogs",
            "options": {
                "awslogs-group": log_group,
                "awslogs-region": region,
                "awslogs-stream-prefix": container,
            },
        },
    }
    return pulumi.Output.json_dumps([definition])
