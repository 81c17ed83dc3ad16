"""Calls under way: the executor that carries out a schedule, one per device, and what its call
hands on.

Imports every room below `presets`, but never cuts a model into stages.
"""
