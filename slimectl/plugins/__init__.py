"""Components and user functions by name or import path: loaded, called by parameter name, and contained."""
