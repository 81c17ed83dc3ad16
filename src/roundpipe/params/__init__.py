"""The copies of every parameter: working (host), master (host), resident (device), and their gradients."""
