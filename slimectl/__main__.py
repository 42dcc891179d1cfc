"""`python -m slimectl` is `slimectl`."""

from slimectl.cli import main

if __name__ == "__main__":
    main()
