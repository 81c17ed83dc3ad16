"""The tests. A package, so that they can import `tests.support` whatever else is installed."""
