"""The command line: options in, one stage, records out."""

import os
import signal
import sys
import threading


def main() -> None:
    """Entry point of `slimectl`."""
    # Idle OpenMP threads sleep instead of spinning: on a busy machine spinning costs more than the threads gain. It has
    # to be said before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from slimectl.cli.app import app

        app()
    except KeyboardInterrupt:  # while commands are imported; what comes later is theirs
        sys.stderr.write("slimectl: interrupted\n")
        sys.exit(130)
    finally:
        # All is said and done: a late Ctrl-C is not to tear what libraries do at exit apart.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
