"""The internal load balancer in front of the streamers. Its timeouts never cut a living stream."""

import pulumi
import pulumi_aws as aws

from infra.api.document import STAGE
from infra.components.network import HTTP_PORT, Network
from infra.settings import StackSettings
from infra.tags import Component, tags

IDLE_SECONDS = 400
"""Above API Gateway's own idle cut of 300 s: the outermost timeout decides."""

DEREGISTRATION_SECONDS = 5
"""Streams are closed by the streamer's own drain, after which clients resume elsewhere: waiting longer helps nobody."""


class Balancer(pulumi.ComponentResource):
    """An ALB, its target group of streamers, and the VPC link that API Gateway reaches it by."""

    def __init__(
        self, name: str, settings: StackSettings, network: Network, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("chat:balancer:Balancer", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        tagged = tags(settings, Component.STREAMING)
        subnets = [subnet.id for subnet in network.subnets]
        self.balancer = aws.lb.LoadBalancer(
            name,
            internal=True,
            load_balancer_type="application",
            security_groups=[network.balancer.id],
            subnets=subnets,
            idle_timeout=IDLE_SECONDS,
            drop_invalid_header_fields=True,
            tags=tagged,
            opts=child,
        )
        self.targets = aws.lb.TargetGroup(
            name,
            port=HTTP_PORT,
            protocol="HTTP",
            target_type="ip",
            vpc_id=network.vpc.id,
            deregistration_delay=DEREGISTRATION_SECONDS,
            load_balancing_algorithm_type="least_outstanding_requests",
            health_check={"path": "/healthz", "interval": 5, "timeout": 3, "healthy_threshold": 2},
            tags=tagged,
            opts=child,
        )
        self.listener = aws.lb.Listener(
            name,
            load_balancer_arn=self.balancer.arn,
            port=HTTP_PORT,
            protocol="HTTP",
            default_actions=[{"type": "forward", "target_group_arn": self.targets.arn}],
            tags=tagged,
            opts=child,
        )
        self._without_stage(name, tagged)
        self.link = aws.apigatewayv2.VpcLink(
            name, subnet_ids=subnets, security_group_ids=[network.balancer.id], tags=tagged, opts=child
        )
        self.url = pulumi.Output.concat("http://", self.balancer.dns_name, f":{HTTP_PORT}")
        self.register_outputs({})

    def _without_stage(self, name: str, tagged: dict[str, str]) -> None:
        """Over a VPC link the gateway puts the stage's name before the path; it is taken off here."""
        aws.lb.ListenerRule(
            name,
            listener_arn=self.listener.arn,
            priority=1,
            conditions=[{"path_pattern": {"values": [f"/{STAGE}/*"]}}],
            transforms=[
                {
                    "type": "url-rewrite",
                    "url_rewrite_config": {"rewrite": {"regex": f"^/{STAGE}/(.*)$", "replace": "/$1"}},
                }
            ],
            actions=[{"type": "forward", "target_group_arn": self.targets.arn}],
            tags=tagged,
            opts=pulumi.ResourceOptions(parent=self),
        )

    def target(self, container: str) -> dict[str, pulumi.Input[str] | int]:
        """How an ECS service registers its containers."""
        return {"target_group_arn": self.targets.arn, "container_name": container, "container_port": HTTP_PORT}
