"""Pure decisions: costs -> stages -> an explicit list of actions per device. Nothing here touches a
device.

Imports `errors` only, and the formula for the size of a slot.
"""
