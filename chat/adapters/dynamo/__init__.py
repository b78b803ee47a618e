"""Conversations, generations and accounts in DynamoDB; contents too large for an item in S3."""

from chat.adapters.dynamo.stores import Stores, connect, connect_blocking

__all__ = ["Stores", "connect", "connect_blocking"]
