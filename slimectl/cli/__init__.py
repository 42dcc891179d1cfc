"""Entry point of the command line."""

import os
import sys


def main() -> None:
    """Run the command line. Exits with the code of the command."""
    # Idle OpenMP threads sleep instead of spinning: on a busy machine spinning costs more than the threads gain. The
    # variable must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from slimectl.cli.signals import end_at_once, end_by_signals
    from slimectl.errors import EXIT_INTERRUPTED, EXIT_READER_GONE, SettingsError, StorageError
    from slimectl.system import stdio

    stdio.protect()
    stdio.log_to_stderr()
    try:
        if shell := os.environ.get("_SLIMECTL_COMPLETE"):
            from slimectl.cli.app import app
            from slimectl.cli.completion import print_candidates

            print_candidates(app, shell, os.environ.get("_SLIMECTL_LINE", ""))
            return
        end_by_signals()
        if sys.flags.optimize > 1:
            stdio.say(
                "slimectl: Python runs with PYTHONOPTIMIZE=2 (-OO), which removes the docstrings that transformers and "
                "the help need. Unset PYTHONOPTIMIZE, or set it to 1"
            )
            sys.exit(SettingsError.exit_code)
        from slimectl.cli.app import app

        try:  # the help is printed outside of any command
            app()
        except SystemExit as end:
            # Typer exits with 130 and prints nothing if a signal interrupts it while it parses the arguments.
            cause = getattr(end.__context__, "__cause__", None)
            raise (cause if isinstance(cause, KeyboardInterrupt) else end) from None
        finally:
            stdio.flush()
    except StorageError as error:
        stdio.say(f"slimectl: {error}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(EXIT_READER_GONE)
    except KeyboardInterrupt as error:  # before a command starts. From then on, the command handles it
        stdio.say(f"slimectl: {str(error) or 'interrupted'}")
        sys.exit(getattr(error, "exit_code", EXIT_INTERRUPTED))
    finally:
        end_at_once()  # a late Ctrl-C must not interrupt the exit handlers of libraries
