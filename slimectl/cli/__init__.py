"""The command line: options in, one stage, records out."""


def main() -> None:
    """Entry point of `slimectl`."""
    from slimectl.cli.app import app

    app()
