"""What goes between host and devices: boundaries, weights, and kept inputs that have to make room.

Imports `params`, `memory`, `device` and what these may import.
"""
