"""Weight sync: sends new weights to the engines."""
