"""Worked examples of agents: tools, search, code and debate, each a plain async function."""
