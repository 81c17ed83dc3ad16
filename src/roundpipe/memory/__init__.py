"""Host memory that devices can copy from quickly, and reusable device buffers."""
