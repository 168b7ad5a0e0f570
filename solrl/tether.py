"""`python tether.py COMMAND...` becomes COMMAND, which gets SIGTERM when its parent dies.

The kernel's parent-death signal survives exec. It is set here, after the fork and before the
command, so that no code runs between the two in a parent that may have threads. Linux only;
elsewhere the command just runs.
"""

import ctypes
import os
import signal
import sys

#: Process id of whoever starts tethered children; every tethered process sets it to its own.
PARENT = "SOLRL_PARENT_PID"
PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        # The parent may have died before the line above: then no signal will ever come.
        if os.getppid() != int(os.environ[PARENT]):
            sys.exit(f"the parent {os.environ[PARENT]} is gone")
    os.environ[PARENT] = str(os.getpid())
    os.execvp(sys.argv[1], sys.argv[1:])
