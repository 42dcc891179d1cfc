"""The command line: options in, one stage, records out."""
