"""Apply once: `python -m stacks.local.applier <options.json>`; writes `$LOCAL_DIR/state/applied.json`."""

import dataclasses
import json
import sys
from pathlib import Path

from stacks.local.applier.applied import Backends
from stacks.local.applier.apply import apply
from stacks.local.options import Options
from stacks.local.program import stack_config


def main(options_file: str) -> None:
    options = Options.read(Path(options_file))
    ports, state = options.ports(), options.local_dir / "state"
    aws_url = f"http://127.0.0.1:{ports['ministack']}"
    backends = Backends(aws_url, "127.0.0.1", ports["valkey"], state)
    applied = apply(stack_config("local", options.overrides(aws_url)), backends)
    streamers = [f"http://127.0.0.1:{ports[f'streamer-{number}']}" for number in range(options.streamers)]
    facts = {
        "awsUrl": aws_url,
        "apiUrl": applied.api_url,
        "audience": applied.audience,
        "userPoolId": applied.user_pool_id,
        "accountsTable": applied.accounts_table,
        "streamers": streamers,
        "services": [dataclasses.asdict(service) for service in applied.services],
    }
    draft = state / "applied.draft"
    draft.touch(mode=0o600)  # a task's environment may hold a provider's key
    draft.write_text(json.dumps(facts, indent=1))
    draft.replace(state / "applied.json")


if __name__ == "__main__":
    main(sys.argv[1])
