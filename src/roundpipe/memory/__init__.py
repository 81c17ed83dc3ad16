"""Host memory that devices can copy from quickly, and reusable device buffers.

Imports `device`, `system` and what these may import.
"""
