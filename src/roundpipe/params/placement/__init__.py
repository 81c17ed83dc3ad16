"""Where the newest value of a parameter is: on the host, in a second buffer, not yet computed, or
on a device.

Imports what `params` may import, and `params` itself.
"""
