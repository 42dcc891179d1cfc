"""The command line: options in, one stage, records out."""

import os
import sys


def main() -> None:
    """Entry point of `slimectl`."""
    # Idle OpenMP threads sleep instead of spinning: on a busy machine spinning costs more than the threads gain. It has
    # to be said before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from slimectl import stdio

    stdio.protect()
    from slimectl.cli.app import app
    from slimectl.errors import EXIT_READER_GONE, StorageError

    try:  # the help is written outside of every command
        try:
            app()
        finally:
            stdio.flush()
    except StorageError as error:
        stdio.say(f"slimectl: {error}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(EXIT_READER_GONE)
