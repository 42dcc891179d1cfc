"""Sandbox for programs that a model wrote: a launcher (runner.py) and the jail that it starts.

The rest of slimectl calls runner.py. The other files run in the jail's own processes, which start without slimectl's
dependencies, so these files import only the standard library and each other.
"""
