"""C code that is faster than torch's operators, compiled on the user's machine, with fallbacks in Python."""
