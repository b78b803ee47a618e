"""The token buffer's and the lanes' home: ElastiCache for Valkey in cluster mode."""

import pulumi
import pulumi_aws as aws

from infra.components.network import VALKEY_PORT, Network
from infra.components.secret import Secret
from infra.settings import StackSettings
from infra.tags import Component, tags


class Cache(pulumi.ComponentResource):
    """`url` is the configuration endpoint. Scripts use one hash tag each, so shards can be added at any time.

    Only the tasks' security group reaches it; over TLS, with the password, where the stack has TLS.
    """

    def __init__(
        self, name: str, settings: StackSettings, network: Network, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("chat:cache:Cache", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        subnets = aws.elasticache.SubnetGroup(
            name,
            subnet_ids=[subnet.id for subnet in network.subnets],
            tags=tags(settings, Component.DATA),
            opts=child,
        )
        self.password = (
            Secret(f"{name}-password", settings, settings.cache_password, Component.DATA, child)
            if settings.cache_password
            else None
        )
        several = settings.cache_replicas > 0
        self.group = aws.elasticache.ReplicationGroup(
            name,
            description="Token buffer, lanes and quota counters",
            engine="valkey",
            engine_version="8.1",
            node_type=settings.cache_node_type,
            cluster_mode="enabled",
            num_node_groups=settings.cache_shards,
            replicas_per_node_group=settings.cache_replicas,
            automatic_failover_enabled=True,
            multi_az_enabled=several,
            at_rest_encryption_enabled=True,
            transit_encryption_enabled=settings.cache_tls,
            auth_token=self.password.value if self.password else None,
            port=VALKEY_PORT,
            subnet_group_name=subnets.name,
            security_group_ids=[network.cache.id],
            tags=tags(settings, Component.DATA),
            opts=child,
        )
        scheme = "rediss" if settings.cache_tls else "redis"
        self.url = pulumi.Output.concat(
            scheme, "://", self.group.configuration_endpoint_address, ":", self.group.port.apply(str)
        )
        self.register_outputs({"url": self.url})
