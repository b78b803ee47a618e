"""What is never lost: the tables and the bucket of large contents. Keys are those of `chat/keys.py`."""

from collections.abc import Sequence
from typing import Any

import pulumi
import pulumi_aws as aws

from chat.keys import BY_USER_INDEX, OPEN_BY_EXPIRY_INDEX
from infra.settings import StackSettings
from infra.tags import Component, tags

ITEM_ACTIONS = (
    "dynamodb:BatchWriteItem",
    "dynamodb:ConditionCheckItem",
    "dynamodb:DeleteItem",
    "dynamodb:GetItem",
    "dynamodb:PutItem",
    "dynamodb:Query",
    "dynamodb:UpdateItem",
)
OBJECT_ACTIONS = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject")


class Data(pulumi.ComponentResource):
    """Tables on demand with encryption, point-in-time recovery and streams. Key changes replace a table."""

    def __init__(self, name: str, settings: StackSettings, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("chat:data:Data", name, None, opts)
        self._settings = settings
        self.conversations = self._table(
            f"{name}-conversations",
            ("conversationId", "item"),
            {"userId": "S", "updatedKey": "S"},
            {BY_USER_INDEX: ("userId", "updatedKey")},
            stream=True,
        )
        self.generations = self._table(
            f"{name}-generations",
            ("generationId",),
            {"openShard": "S", "expiresAt": "N"},
            {OPEN_BY_EXPIRY_INDEX: ("openShard", "expiresAt")},
        )
        self.accounts = self._table(f"{name}-accounts", ("userId", "item"))
        self.ledger = self._table(f"{name}-ledger", ("userId", "entry"), stream=True)
        self.contents = self._bucket(f"{name}-contents")
        self.register_outputs({})

    def _table(
        self,
        name: str,
        keys: Sequence[str],
        more_attributes: dict[str, str] | None = None,
        indexes: dict[str, tuple[str, str]] | None = None,
        *,
        stream: bool = False,
    ) -> aws.dynamodb.Table:
        attributes = dict.fromkeys(keys, "S") | (more_attributes or {})
        protected = self._settings.protect_data
        return aws.dynamodb.Table(
            name,
            billing_mode="PAY_PER_REQUEST",
            hash_key=keys[0],
            range_key=keys[1] if len(keys) > 1 else None,
            attributes=[{"name": one, "type": kind} for one, kind in attributes.items()],
            global_secondary_indexes=[
                {"name": index, "hash_key": parts[0], "range_key": parts[1], "projection_type": "ALL"}
                for index, parts in (indexes or {}).items()
            ],
            stream_enabled=stream,
            stream_view_type="NEW_AND_OLD_IMAGES" if stream else None,
            point_in_time_recovery={"enabled": protected},
            server_side_encryption={"enabled": True},
            deletion_protection_enabled=protected,
            tags=tags(self._settings, Component.DATA),
            opts=pulumi.ResourceOptions(parent=self, protect=protected),
        )

    def _bucket(self, name: str) -> aws.s3.Bucket:
        bucket = aws.s3.Bucket(
            name,
            tags=tags(self._settings, Component.DATA),
            opts=pulumi.ResourceOptions(parent=self, protect=self._settings.protect_data),
        )
        aws.s3.BucketPublicAccessBlock(
            name,
            bucket=bucket.id,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=pulumi.ResourceOptions(parent=self),
        )
        return bucket

    def values(self) -> dict[str, pulumi.Output[str]]:
        """What `chat.settings.StoreSettings` reads of this."""
        return {
            "conversations_table": self.conversations.name,
            "generations_table": self.generations.name,
            "accounts_table": self.accounts.name,
            "ledger_table": self.ledger.name,
            "content_bucket": self.contents.id,
        }

    def statements(self) -> list[dict[str, Any]]:
        """IAM statements that go with `values`: items and objects, no table management."""
        tables = (self.conversations, self.generations, self.accounts, self.ledger)
        arns: list[pulumi.Input[str]] = [table.arn for table in tables]
        arns += [pulumi.Output.concat(table.arn, "/index/*") for table in (self.conversations, self.generations)]
        return [
            {"Effect": "Allow", "Action": list(ITEM_ACTIONS), "Resource": arns},
            {
                "Effect": "Allow",
                "Action": list(OBJECT_ACTIONS),
                "Resource": [pulumi.Output.concat(self.contents.arn, "/contents/*")],
            },
        ]
