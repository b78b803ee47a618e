"""A replica: `python -m containers.worker.app`.

The engine's child processes import this module too (that is how Python spawns), so the rest comes later.
"""

import ctypes
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however that happens.

    A replica that was killed would otherwise leave an engine behind, which fills memory and a core for nobody.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    from containers.common.process import run
    from containers.worker.service import main

    run(main)
elif __name__ == "__mp_main__":
    end_with_parent()
