"""The command line: options in, one stage, records out."""

import os


def main() -> None:
    """Entry point of `slimectl`."""
    # Idle OpenMP threads sleep instead of spinning: on a busy machine spinning costs more than the threads gain. It has
    # to be said before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from slimectl.cli.app import app

    app()
