"""Sandbox for programs that a model wrote: a launcher (runner) and the jail that it starts.

runner.py is called by the rest of slimectl. The other files run inside of the jail's own processes, which start without
slimectl's dependencies: they import the standard library and each other only.
"""
