"""A module that cannot be imported."""

import a_library_that_nobody_installed  # noqa: F401
