"""Which plan a call uses now: measured costs, memory limits, and the planner that keeps plans.

Imports `plan`, `params`, `device` and what these may import.
"""
