"""One process that `autopar launch` starts: it joins the others, then runs the script.

`python -m autopar.tools.launched ADDRESS PROCESSES RANK DEVICES LOST_SECONDS FOLDER SCRIPT [ARGUMENT ...]`
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Sequence

import jax

from autopar.checkpoint import resumed_in
from autopar.distributed import initialize

_STDIN = 0
"""The file descriptor of standard input, by POSIX."""


def main(argv: Sequence[str]) -> int:
    """The exit status of the script."""
    address, processes, rank, devices, lost_seconds, folder, *command = argv
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    if int(devices):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", int(devices))
    initialize(
        address,
        int(processes),
        int(rank),
        local_device_ids=None if int(devices) else [int(rank)],
        cluster_detection_method="deactivate",
        lost_seconds=float(lost_seconds),
    )
    resumed_in(folder)
    sys.argv = list(command)
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else 1 if end.code else 0
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # of several processes it ends this one
        return 1
    return 0


def _end_with_launcher() -> None:
    """Ends this process when the one that started it is gone, which closes the pipe between them."""
    while os.read(_STDIN, 1):  # not by `sys.stdin`, whose lock would be in the way of a regular end
        pass
    os._exit(1)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status:
        # At once: at a regular end JAX would wait for the others, who wait for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
