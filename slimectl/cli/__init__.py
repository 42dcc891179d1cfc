"""The command line: options in, one stage, records out."""

import os
import signal
import sys
import threading


def main() -> None:
    """Entry point of `slimectl`."""
    # Idle OpenMP threads sleep instead of spinning: on a busy machine spinning costs more than the threads gain. The
    # variable must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from slimectl import stdio
    from slimectl.errors import EXIT_INTERRUPTED, EXIT_READER_GONE, StorageError

    stdio.protect()
    stdio.log_to_stderr()
    try:
        from slimectl.cli.app import app

        try:  # the help is written outside of every command
            app()
        finally:
            stdio.flush()
    except StorageError as error:
        stdio.say(f"slimectl: {error}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(EXIT_READER_GONE)
    except KeyboardInterrupt:  # while commands are imported; later ones are handled by the command
        stdio.say("slimectl: interrupted")
        sys.exit(EXIT_INTERRUPTED)
    finally:
        # A late Ctrl-C must not interrupt the exit handlers of libraries.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
