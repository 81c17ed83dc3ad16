"""Spans of what runs where, and profiles made of them. Imports `errors` only."""
