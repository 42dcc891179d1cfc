"""Streams, secrets, HTTP, shared memory, compiled C code and untrusted files, for all packages above."""
