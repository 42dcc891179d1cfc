"""Verifiers, one file each."""
