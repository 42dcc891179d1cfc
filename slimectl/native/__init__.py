"""C sources that a machine's own compiler makes faster than torch's operators, and their equals without a compiler."""
