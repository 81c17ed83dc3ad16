"""Carries schedules out: worker threads, one call's shared state, transfers, recompute. Chooses nothing."""
