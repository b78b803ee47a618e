"""The REST API, provisioned from the OpenAPI document."""

import hashlib

import pulumi
import pulumi_aws as aws

from infra.api.document import STAGE, render
from infra.components.balancer import Balancer
from infra.components.functions import LOG_DAYS, Function, assume
from infra.settings import StackSettings
from infra.tags import Component, tags

LOGS_POLICY = "arn:aws:iam::aws:policy/service-role/AmazonAPIGatewayPushToCloudWatchLogs"


class Api(pulumi.ComponentResource):
    """Routes to functions by proxy, streaming routes to the streamers through the VPC link."""

    def __init__(
        self,
        name: str,
        settings: StackSettings,
        region: str,
        functions: dict[str, Function],
        balancer: Balancer,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("chat:api:Api", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        tagged = tags(settings, Component.API)
        arns = {one: function.function.arn for one, function in functions.items()}
        body = pulumi.Output.all(
            arns=arns, url=balancer.url, link=balancer.link.id, target=balancer.balancer.arn
        ).apply(lambda got: render(region, got["arns"], got["url"], got["link"], got["target"]))
        self.rest = aws.apigateway.RestApi(
            name,
            body=body,
            endpoint_configuration={"types": "REGIONAL"},
            minimum_compression_size=None,
            tags=tagged,
            opts=child,
        )
        deployment = aws.apigateway.Deployment(
            name,
            rest_api=self.rest.id,
            triggers={"document": body.apply(lambda text: hashlib.sha256(text.encode()).hexdigest())},
            opts=child,
        )
        account = self._account(name, tagged)
        logs = aws.cloudwatch.LogGroup(f"{name}-access", retention_in_days=LOG_DAYS, tags=tagged, opts=child)
        self.stage = aws.apigateway.Stage(
            name,
            rest_api=self.rest.id,
            deployment=deployment.id,
            stage_name=STAGE,
            xray_tracing_enabled=True,
            access_log_settings={
                "destination_arn": logs.arn,
                "format": '{"requestId":"$context.requestId","route":"$context.resourcePath",'
                '"method":"$context.httpMethod","status":"$context.status","latencyMs":"$context.responseLatency"}',
            },
            tags=tagged,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[account]),
        )
        for one, function in functions.items():
            aws.lambda_.Permission(
                f"{name}-{one}",
                action="lambda:InvokeFunction",
                function=function.function.name,
                principal="apigateway.amazonaws.com",
                source_arn=pulumi.Output.concat(self.rest.execution_arn, "/*"),
                opts=child,
            )
        self.url = self.stage.invoke_url
        self.register_outputs({"url": self.url})

    def _account(self, name: str, tagged: dict[str, str]) -> aws.apigateway.Account:
        """The role by which API Gateway writes access logs; one for all APIs of an account and region."""
        child = pulumi.ResourceOptions(parent=self)
        trust = assume("apigateway.amazonaws.com")
        role = aws.iam.Role(f"{name}-logs", assume_role_policy=trust, tags=tagged, opts=child)
        granted = aws.iam.RolePolicyAttachment(f"{name}-logs", role=role.name, policy_arn=LOGS_POLICY, opts=child)
        return aws.apigateway.Account(
            name,
            cloudwatch_role_arn=role.arn,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[granted], retain_on_delete=True),
        )
