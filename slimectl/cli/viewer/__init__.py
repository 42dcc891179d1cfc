"""The browser view of runs and samples: `slimectl view`."""
