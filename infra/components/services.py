"""The containers on Fargate: streamer, dispatcher, and a worker for each pool."""

from typing import Any

import pulumi
import pulumi_aws as aws

from infra.components.functions import LOG_DAYS, assume, policy
from infra.components.network import HTTP_PORT, Network
from infra.settings import StackSettings
from infra.tags import Component, tags

STOP_SECONDS = 120
"""Fargate's most; every runtime's drain time is shorter."""

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
        environment: dict[str, pulumi.Input[str]],
        statements: list[dict[str, Any]],
        cpu: int = 1024,
        memory: int = 2048,
        target_group: aws.lb.TargetGroup | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("chat:services:Service", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        tagged = tags(settings, component)
        role = aws.iam.Role(name, assume_role_policy=assume("ecs-tasks.amazonaws.com"), tags=tagged, opts=child)
        aws.iam.RolePolicy(name, role=role.id, policy=policy(statements), opts=child)
        execution = aws.iam.Role(
            f"{name}-execution", assume_role_policy=assume("ecs-tasks.amazonaws.com"), tags=tagged, opts=child
        )
        aws.iam.RolePolicyAttachment(name, role=execution.name, policy_arn=EXECUTION_POLICY, opts=child)
        logs = aws.cloudwatch.LogGroup(name, retention_in_days=LOG_DAYS, tags=tagged, opts=child)
        self.task = aws.ecs.TaskDefinition(
            name,
            family=name,
            requires_compatibilities=["FARGATE"],
            network_mode="awsvpc",
            cpu=str(cpu),
            memory=str(memory),
            runtime_platform={"cpu_architecture": "ARM64", "operating_system_family": "LINUX"},
            task_role_arn=role.arn,
            execution_role_arn=execution.arn,
            container_definitions=self._definitions(
                container, settings.images.get(container, f"chat-{container}:local"), environment, logs.name, region
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
            network_configuration={
                "subnets": [subnet.id for subnet in network.subnets],
                "security_groups": [network.tasks.id],
                "assign_public_ip": False,
            },
            load_balancers=[
                {"target_group_arn": target_group.arn, "container_name": container, "container_port": HTTP_PORT}
            ]
            if target_group
            else [],
            deployment_circuit_breaker={"enable": True, "rollback": True},
            deployment_minimum_healthy_percent=100,
            deployment_maximum_percent=200,
            propagate_tags="SERVICE",
            tags=tagged,
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=["desiredCount"]),
        )
        self.register_outputs({})

    @staticmethod
    def _definitions(
        container: str,
        image: str,
        environment: dict[str, pulumi.Input[str]],
        log_group: pulumi.Output[str],
        region: str,
    ) -> pulumi.Output[str]:
        return pulumi.Output.json_dumps(
            [
                {
                    "name": container,
                    "image": image,
                    "essential": True,
                    "readonlyRootFilesystem": True,
                    "user": "10001",
                    "portMappings": [{"containerPort": HTTP_PORT, "protocol": "tcp"}],
                    "environment": [{"name": key, "value": value} for key, value in sorted(environment.items())],
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
            ]
        )
