"""Entry point of `pulumi up`; the local environment runs the same program in process."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Pulumi runs this folder, not the package

from infra.settings import StackSettings
from infra.stack import deploy

deploy(StackSettings.load())
