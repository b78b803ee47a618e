"""Outputs of resources that have no local meaning: networks, balancers, logs, roles."""

from collections.abc import Callable
from typing import Any

from stacks.local.backends import REGION

ACCOUNT = "000000000000"


def arn(service: str, name: str) -> str:
    """An ARN of the local account."""
    return f"arn:aws:{service}:{REGION}:{ACCOUNT}:{name}"


Outputs = Callable[[str, dict[str, Any]], tuple[str, dict[str, Any]]]


def _plain(service: str) -> Outputs:
    return lambda name, inputs: (f"{name}-id", {"arn": arn(service, name), "name": inputs.get("name") or name})


def _role(name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return name, {"arn": f"arn:aws:iam::{ACCOUNT}:role/{name}", "name": name, "uniqueId": name}


def _vpc(name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return f"vpc-{name}", {"arn": arn("ec2", f"vpc/{name}"), "cidrBlock": inputs["cidrBlock"]}


def _balancer(name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    own = arn("elasticloadbalancing", f"loadbalancer/app/{name}")
    return own, {"arn": own, "dnsName": f"{name}.elb.internal", "arnSuffix": f"app/{name}"}


def _secret(name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    own = arn("secretsmanager", f"secret:{name}")
    return own, {"arn": own, "name": name}


def _secret_version(name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return f"{name}-1", {"secretArn": inputs["secretId"], "versionId": "1"}


OUTPUTS: dict[str, Outputs] = {
    "aws:apigateway/account:Account": _plain("apigateway"),
    "aws:apigatewayv2/vpcLink:VpcLink": _plain("apigateway"),
    "aws:cloudwatch/logGroup:LogGroup": _plain("logs"),
    "aws:ec2/eip:Eip": _plain("ec2"),
    "aws:ec2/internetGateway:InternetGateway": _plain("ec2"),
    "aws:ec2/natGateway:NatGateway": _plain("ec2"),
    "aws:ec2/route:Route": _plain("ec2"),
    "aws:ec2/routeTable:RouteTable": _plain("ec2"),
    "aws:ec2/routeTableAssociation:RouteTableAssociation": _plain("ec2"),
    "aws:ec2/securityGroup:SecurityGroup": _plain("ec2"),
    "aws:ec2/subnet:Subnet": _plain("ec2"),
    "aws:ec2/vpc:Vpc": _vpc,
    "aws:ec2/vpcEndpoint:VpcEndpoint": _plain("ec2"),
    "aws:ecs/cluster:Cluster": _plain("ecs"),
    "aws:elasticache/subnetGroup:SubnetGroup": _plain("elasticache"),
    "aws:iam/role:Role": _role,
    "aws:iam/rolePolicy:RolePolicy": _plain("iam"),
    "aws:iam/rolePolicyAttachment:RolePolicyAttachment": _plain("iam"),
    "aws:lambda/permission:Permission": _plain("lambda"),
    "aws:lb/listener:Listener": _plain("elasticloadbalancing"),
    "aws:lb/listenerRule:ListenerRule": _plain("elasticloadbalancing"),
    "aws:lb/loadBalancer:LoadBalancer": _balancer,
    "aws:lb/targetGroup:TargetGroup": _plain("elasticloadbalancing"),
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock": _plain("s3"),
    "aws:secretsmanager/secret:Secret": _secret,
    "aws:secretsmanager/secretVersion:SecretVersion": _secret_version,
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": _plain("ec2"),
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": _plain("ec2"),
}
