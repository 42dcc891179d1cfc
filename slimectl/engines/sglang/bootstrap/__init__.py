"""Scripts and modules that run in SGLang's Python. They do not import slimectl."""
