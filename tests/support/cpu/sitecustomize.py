"""Python imports this module when it starts, if PYTHONPATH names its folder."""

import cpu_shims  # noqa: F401
