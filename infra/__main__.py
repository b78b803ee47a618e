"""Entry point of `pulumi up`; the local environment runs the same program in process."""

from infra.settings import StackSettings
from infra.stack import deploy

deploy(StackSettings.load())
