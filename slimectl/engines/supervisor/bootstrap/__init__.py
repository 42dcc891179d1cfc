"""Modules that run in a server's own Python, beside its launch script; standard library only, none imports slimectl."""
