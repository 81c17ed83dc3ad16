"""What makes running a layer twice give the same result: random streams, draws, and what layers
save for it.

Imports `device` and `errors`.
"""
