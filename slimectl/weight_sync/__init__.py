"""Weight sync: send new weights to the engines."""
