"""The network: private subnets in three zones for everything that runs, public ones for the NAT gateways only."""

from typing import Any

import pulumi
import pulumi_aws as aws

from infra.settings import StackSettings
from infra.tags import Component, tags

ZONES = ("a", "b", "c")
HTTP_PORT = 8080
VALKEY_PORT = 6379
ANYWHERE = "0.0.0.0/0"


class Network(pulumi.ComponentResource):
    """A VPC with private subnets (`subnets`), a way out, and endpoints for DynamoDB and S3, which cost nothing.

    `tasks` is the security group of everything that runs; `cache` admits only it; `balancer` is reached from
    inside the VPC.
    """

    def __init__(
        self, name: str, settings: StackSettings, region: str, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("chat:network:Network", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        tagged = tags(settings, Component.NETWORK)
        self.vpc = aws.ec2.Vpc(
            name, cidr_block="10.0.0.0/16", enable_dns_hostnames=True, enable_dns_support=True, tags=tagged, opts=child
        )
        self.subnets = [
            aws.ec2.Subnet(
                f"{name}-{zone}",
                vpc_id=self.vpc.id,
                cidr_block=f"10.0.{16 * place}.0/20",
                availability_zone=f"{region}{zone}",
                tags=tagged,
                opts=child,
            )
            for place, zone in enumerate(ZONES)
        ]
        routes = self._routes_out(name, settings, region, tagged)
        for service in ("dynamodb", "s3"):
            aws.ec2.VpcEndpoint(
                f"{name}-{service}",
                vpc_id=self.vpc.id,
                service_name=f"com.amazonaws.{region}.{service}",
                vpc_endpoint_type="Gateway",
                route_table_ids=[table.id for table in routes],
                tags=tagged,
                opts=child,
            )
        self.tasks = self._group(f"{name}-tasks", "Functions and containers", tagged)
        self.balancer = self._group(f"{name}-balancer", "The internal load balancer", tagged)
        self.cache = self._group(f"{name}-cache", "Valkey", tagged)
        self._admit(f"{name}-balancer-in", self.balancer, HTTP_PORT, cidr=self.vpc.cidr_block)
        self._admit(f"{name}-tasks-in", self.tasks, HTTP_PORT, source=self.balancer)
        self._admit(f"{name}-cache-in", self.cache, VALKEY_PORT, source=self.tasks)
        self.register_outputs({})

    def placement(self) -> dict[str, Any]:
        """Where ECS runs tasks."""
        subnets = [subnet.id for subnet in self.subnets]
        return {"subnets": subnets, "security_groups": [self.tasks.id], "assign_public_ip": False}

    def _routes_out(
        self, name: str, settings: StackSettings, region: str, tagged: dict[str, str]
    ) -> list[aws.ec2.RouteTable]:
        """The private route tables, one a zone, each with a NAT gateway to the internet."""
        child = pulumi.ResourceOptions(parent=self)
        internet = aws.ec2.InternetGateway(name, vpc_id=self.vpc.id, tags=tagged, opts=child)
        public = aws.ec2.RouteTable(f"{name}-public", vpc_id=self.vpc.id, tags=tagged, opts=child)
        to_internet = aws.ec2.Route(
            f"{name}-public",
            route_table_id=public.id,
            destination_cidr_block=ANYWHERE,
            gateway_id=internet.id,
            opts=child,
        )
        gateways = []
        for place, zone in enumerate(ZONES[: settings.nat_gateways]):
            subnet = aws.ec2.Subnet(
                f"{name}-public-{zone}",
                vpc_id=self.vpc.id,
                cidr_block=f"10.0.{240 + place}.0/24",
                availability_zone=f"{region}{zone}",
                tags=tagged,
                opts=child,
            )
            aws.ec2.RouteTableAssociation(
                f"{name}-public-{zone}", subnet_id=subnet.id, route_table_id=public.id, opts=child
            )
            address = aws.ec2.Eip(f"{name}-{zone}", domain="vpc", tags=tagged, opts=child)
            gateways.append(
                aws.ec2.NatGateway(
                    f"{name}-{zone}",
                    subnet_id=subnet.id,
                    allocation_id=address.id,
                    tags=tagged,
                    opts=pulumi.ResourceOptions(parent=self, depends_on=[to_internet]),
                )
            )
        tables = []
        for place, (zone, subnet) in enumerate(zip(ZONES, self.subnets, strict=True)):
            table = aws.ec2.RouteTable(f"{name}-{zone}", vpc_id=self.vpc.id, tags=tagged, opts=child)
            aws.ec2.RouteTableAssociation(f"{name}-{zone}", subnet_id=subnet.id, route_table_id=table.id, opts=child)
            aws.ec2.Route(
                f"{name}-{zone}",
                route_table_id=table.id,
                destination_cidr_block=ANYWHERE,
                nat_gateway_id=gateways[place % len(gateways)].id,
                opts=child,
            )
            tables.append(table)
        return tables

    def _group(self, name: str, description: str, tagged: dict[str, str]) -> aws.ec2.SecurityGroup:
        group = aws.ec2.SecurityGroup(
            name, vpc_id=self.vpc.id, description=description, tags=tagged, opts=pulumi.ResourceOptions(parent=self)
        )
        aws.vpc.SecurityGroupEgressRule(
            f"{name}-out",
            security_group_id=group.id,
            ip_protocol="-1",
            cidr_ipv4=ANYWHERE,
            opts=pulumi.ResourceOptions(parent=self),
        )
        return group

    def _admit(
        self,
        name: str,
        group: aws.ec2.SecurityGroup,
        port: int,
        source: aws.ec2.SecurityGroup | None = None,
        cidr: pulumi.Input[str] | None = None,
    ) -> None:
        aws.vpc.SecurityGroupIngressRule(
            name,
            security_group_id=group.id,
            ip_protocol="tcp",
            from_port=port,
            to_port=port,
            referenced_security_group_id=source.id if source else None,
            cidr_ipv4=cidr,
            opts=pulumi.ResourceOptions(parent=self),
        )
